"""A word-level tokenizer for tests: closed vocabulary, one token per word, a template of role tokens."""

from __future__ import annotations

from typing import Any

from mgrpo.policy.tiny import SPECIALS, TEMPLATE, create_tokenizer

__all__ = ["CONTROLS", "SPECIALS", "TEMPLATE", "TEXT", "chatml_tokenizer", "word_tokenizer"]

CONTROLS = ("<call>", "</call>", "<answer>", "</answer>", "<arg>", "<source>", "<evidence>")
TEXT = (
    "what is the capital population of Zubora Merova Tarn p12 p7 4120 searcher planner search visit "
    "answer now no from tool failed error format call task context reader : . , ? < > / | end user"
)


def word_tokenizer(text: str = TEXT, template: str = TEMPLATE) -> Any:
    """The tokenizer of tiny models, over the words of ``text``."""
    tokenizer = create_tokenizer(text.split(), CONTROLS)
    tokenizer.chat_template = template
    return tokenizer


# A template in the manner of Qwen3: thoughts before the last user message are dropped, tool messages share one turn.
CHATML = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif m.role == 'assistant' and '</think>' in m.content %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set rest = m.content.split('</think>')[-1].lstrip('\\n') %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last or keep %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- rest + '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_CORPUS = [
    "What is the capital of Zubora? The capital of Zubora is Merova, population 4120.",
    '{"name": "search", "arguments": {"query": "capital of Zubora"}} hello user assistant tool system answer think',
]


def chatml_tokenizer(keep_thoughts: bool = False, prefill: str = "") -> Any:
    """Byte-level BPE; the role tokens are special, the tags of calls and thoughts are added but not special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tags = ["tool_call", "tool_response", "think"]
    backend.add_tokens([AddedToken(f"<{slash}{tag}>", normalized=False) for tag in tags for slash in ("", "/")])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template="{%- set keep = "
        + str(keep_thoughts).lower()
        + " %}"
        + CHATML.removesuffix("' }}{% endif %}")
        + prefill
        + "' }}{% endif %}",
        clean_up_tokenization_spaces=False,
    )
