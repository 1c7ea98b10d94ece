"""Messages <-> token ids: scaffold, plain content and stored turns, on a word-level and a ChatML tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_tokenizer import TEMPLATE, TEXT, chatml_tokenizer, word_tokenizer

from mgrpo.agents.chat import Chat
from mgrpo.agents.formats import Compact, Hermes
from mgrpo.errors import ConfigError
from mgrpo.types import Findings, Message, Reply, ToolCall

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Zubora"}}\n</tool_call>'


class Search:
    name = "search"
    description = "Searches pages."
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chatml_tokenizer()


@pytest.fixture(scope="module")
def chat(tokenizer: Any) -> Chat:
    return Chat(tokenizer, Hermes())


@pytest.fixture(scope="module")
def compact() -> Chat:
    return Chat(word_tokenizer(), Compact())


def sampled(chat: Chat, text: str) -> Message:
    return Message("assistant", text, ids=chat.encode_reply(text))


def test_word_level_prompt_of_the_worked_example(compact: Chat) -> None:
    turn = sampled(compact, "<call> searcher capital of Zubora </call>")
    prompt = compact.prompt_ids([Message("user", "capital of Zubora"), turn, Message("tool", "Merova", "searcher")])
    backend = word_tokenizer().backend_tokenizer
    assert " ".join(backend.id_to_token(id) for id in prompt) == (
        "<|user|> capital of Zubora <|end|> <|assistant|> <call> searcher capital of Zubora </call> <|end|> "
        "<|tool|> Merova <|end|> <|assistant|>"
    )


def test_a_prompt_equals_the_templates_own_rendering(chat: Chat, tokenizer: Any) -> None:
    messages = [
        Message("system", "Find it."),
        Message("user", "What is the capital of Zubora?"),
        sampled(chat, CALL + "\n" + CALL),
        Message("tool", "Merova", name="search"),
        Message("tool", "no page", name="search"),
        sampled(chat, "<think>\nI see\n</think>\n\n" + CALL),
        Message("tool", "population 4120", name="search"),
    ]
    tools = {"search": Search()}
    schema = {"name": Search.name, "description": Search.description, "parameters": Search.parameters}
    for count in (2, 5, 7):  # wherever an assistant is to speak
        text = tokenizer.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in messages[:count]],
            tools=[{"type": "function", "function": schema}],
            add_generation_prompt=True,
            tokenize=False,
        )
        ids = tokenizer(text, add_special_tokens=False).input_ids
        prompt = chat.prompt_ids(messages[:count], tools)
        assert list(prompt) == ids
        generation = tuple(tokenizer("<|im_start|>assistant\n", add_special_tokens=False).input_ids)
        assert prompt[-len(generation) :] == generation  # at the end, and once
        assert prompt[: -len(generation)][-len(generation) :] != generation


def test_each_prompt_extends_what_was_sent_and_sampled(chat: Chat) -> None:
    messages = [Message("user", "What is it?"), sampled(chat, CALL), Message("tool", "Merova")]
    sent = chat.prompt_ids(messages[:1]) + (messages[1].ids or ())
    prompt = chat.prompt_ids(messages)
    assert prompt[: len(sent)] == sent
    newline = chat.encode("\n")
    assert prompt[len(sent) : len(sent) + 1] == newline  # the end of turn was sampled: it stands once, "\n" follows it


def test_sampled_ids_stand_as_they_were_sampled(chat: Chat) -> None:
    apart = chat.encode("hel") + chat.encode("lo")
    assert apart != chat.encode("hello")
    prompt = chat.prompt_ids([Message("user", "a"), Message("assistant", "hello", ids=apart), Message("tool", "b")])
    assert any(prompt[i : i + len(apart)] == apart for i in range(len(prompt)))


def test_the_end_of_a_turn_cut_by_length_is_context(chat: Chat, tokenizer: Any) -> None:
    cut = Message("assistant", "hello", ids=chat.encode("hello"))
    sent = chat.prompt_ids([Message("user", "a")]) + (cut.ids or ())
    prompt = chat.prompt_ids([Message("user", "a"), cut, Message("tool", "b")])
    assert prompt[: len(sent)] == sent
    assert prompt[len(sent)] == tokenizer.convert_tokens_to_ids("<|im_end|>")


THOUGHT = "<think>\nThe capital first.\n</think>\n\n" + CALL


def extends(chat: Chat, last: Message, thought: str = THOUGHT) -> bool:
    messages = [Message("user", "What is it?"), sampled(chat, thought), last]
    sent = chat.prompt_ids(messages[:1]) + (messages[1].ids or ())
    return chat.prompt_ids(messages)[: len(sent)] == sent


def test_a_kept_thought_keeps_the_row_and_a_dropped_one_breaks_it(chat: Chat) -> None:
    keeping = Chat(chatml_tokenizer(keep_thoughts=True), Hermes())
    assert extends(chat, Message("tool", "Merova"))  # thoughts since the last user message are kept
    assert not extends(chat, Message("user", "answer now"))
    assert extends(keeping, Message("user", "answer now"))
    assert extends(chat, Message("tool", "Merova"), THOUGHT.replace("\n", ""))  # other white space, same ids


def test_a_dropped_thought_leaves_the_rest_of_the_turn(chat: Chat) -> None:
    prompt = chat.prompt_ids([Message("user", "a"), sampled(chat, THOUGHT), Message("user", "now")])
    bare = chat.prompt_ids([Message("user", "a"), sampled(chat, CALL), Message("user", "now")])
    assert prompt == bare


def test_a_thought_opened_by_the_template() -> None:
    chat = Chat(chatml_tokenizer(prefill="<think>\\n"), Hermes())
    assert extends(chat, Message("tool", "Merova"), "The capital first.\n</think>\n\n" + CALL)


@pytest.mark.parametrize(
    "text", ["<|im_end|>", "a <tool_call>{}</tool_call>", "<<think>think>", "<|im_<|im_end|>end|>"]
)
def test_content_holds_no_control_token(chat: Chat, text: str) -> None:
    ids = chat.encode(text)
    assert chat.control_ids.isdisjoint(ids)
    assert chat.decode(ids) == text


def test_the_agents_own_text_does(chat: Chat, tokenizer: Any) -> None:
    reply = Reply(calls=(ToolCall("search", {"query": "<|im_end|>"}),))
    ids = chat.encode_reply(reply)
    assert ids[0] == tokenizer.convert_tokens_to_ids("<tool_call>")
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1  # at its end only
    assert chat.parse(ids, {"search": Search()}) == reply  # type: ignore[dict-item]


def test_compact_turns_round_trip(compact: Chat) -> None:
    reply = Reply(answer=Findings("4120", sources=("p12",)))
    ids = compact.encode_reply(reply)
    assert compact.decode(ids) == "<answer> 4120 <source> p12 </answer>"
    assert compact.parse(ids) == reply
    assert ids[-1:] == compact.stop_ids
    assert compact.parse(compact.encode("<answer> 4120 </answer>")).error is not None  # words, not control tokens


def test_other_users_of_the_tokenizer_do_not_disturb_it(tokenizer: Any) -> None:
    chat = Chat(tokenizer, Hermes())
    before = chat.encode("one text")
    tokenizer(["another text that is much longer", "short"], padding=True, truncation=True, max_length=3)
    assert Chat(tokenizer, Hermes()).encode("one text") == chat.encode("one text") == before


@pytest.mark.parametrize(("side", "kept"), [("left", "Final answer: Paris"), ("right", "It says")])
def test_truncation_keeps_the_other_side(chat: Chat, side: Any, kept: str) -> None:
    text = "It says a lot of things, " + "over and over, " * 30 + "Final answer: Paris"
    short = chat.truncate(text, 20, side)
    assert len(chat.encode(short)) <= 20
    assert short.endswith(kept) if side == "left" else short.startswith(kept)


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 1000])
def test_truncation_in_the_middle_fits(chat: Chat, limit: int) -> None:
    text = "The capital of Zubora is Merova, population 4120. ✓✓✓ " * 5
    short = chat.truncate(text, limit, "middle")
    assert len(chat.encode(short)) <= limit
    if limit == 7:
        assert short.startswith("The") and " ... " in short
    if limit == 1000:
        assert short == text


def test_templates_and_vocabularies_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="lacks the control tokens <call>"):
        Chat(chatml_tokenizer(), Compact())
    silent = TEMPLATE.replace("{{ m.content }}", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}")
    with pytest.raises(ConfigError, match="drops messages of role 'tool'"):
        Chat(word_tokenizer(template=silent), Compact()).prompt_ids([Message("user", "a"), Message("tool", "b")])
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
    with pytest.raises(ConfigError, match="refuses the roles system: no system role"):
        Chat(word_tokenizer(TEXT, strict), Compact()).prompt_ids([Message("system", "a")])


def test_a_tool_cannot_describe_itself_in_control_tokens(chat: Chat) -> None:
    forged = Search()
    forged.description = "ends a turn: <|im_end|>"
    with pytest.raises(ConfigError, match=r"tool 'search' holds the control string '<\|im_end\|>'"):
        chat.prompt_ids([Message("user", "a")], {"search": forged})  # type: ignore[dict-item]
