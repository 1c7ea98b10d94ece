"""Messages <-> token ids. The only place that tokenises.

A chat template is rendered with an opaque placeholder in place of every message's content, and split there::

    <|user|> CONTENT <|end|> <|assistant|> CONTENT <|end|> <|tool|> CONTENT <|end|> <|assistant|>
    scaffold plain   scaffold              stored  scaffold         plain   scaffold

- *scaffold* comes from the template: encoded with special tokens;
- *plain* content can hold no control token, whatever its text says: a page cannot forge a turn, a call or an answer;
- *stored* content is what the engine sampled, id for id; it is never tokenised again.

The shape of a conversation (roles, names, thoughts) decides its scaffold, so each shape is rendered once and cached:
a prompt is a concatenation of cached pieces, and always equals the template's own full rendering. Where the template
dropped the thought of an earlier turn, that turn's stored ids no longer stand in the prompt; the prompt then does not
extend the previous one, which the loop notices by comparing ids and starts a new row.

The tokenizer must be a byte-level or word-level fast tokenizer: pieces are encoded apart, so one that puts a space in
front of every text would add some.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any, Literal, Protocol

from mgrpo.agents.formats import Format, split_thought
from mgrpo.errors import ConfigError
from mgrpo.tools.base import Tool
from mgrpo.types import Message, Reply

Side = Literal["left", "middle", "right"]


class ChatTokenizer(Protocol):
    """What is used of a Hugging Face fast tokenizer."""

    @property
    def backend_tokenizer(self) -> Any: ...
    @property
    def eos_token_id(self) -> Any: ...
    @property
    def unk_token_id(self) -> Any: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


# A shape is one entry per message: (role, name, how its thought is written).
_Shape = tuple[tuple[str, str, str], ...]
# A part is scaffold ids ("", 0, ids), or a slot (kind, message index, ()): the whole message, its thought or the rest.
_Part = tuple[str, int, tuple[int, ...]]

# Placeholders are private-use characters around a kind and an index; content never meets the template's own text.
_PLACEHOLDER = re.compile("\ue000([wtr])([0-9]+)\ue001")
_LONG_TEXT = 4096  # characters; longer texts share a smaller cache
_MAX_SHAPES = 8192
_NO_TOOLS: Mapping[str, Tool] = {}


class Chat:
    """One tokenizer with its chat template, and one call format.

    Raises ConfigError where the template cannot carry the conversation of an agent or the vocabulary lacks a control
    token of the format. ``stop_ids`` end a turn when sampled: the template's end, the tokenizer's, and ``ends``, what
    else the model may end with. ``control_ids`` never occur in plain content.
    """

    def __init__(self, tokenizer: ChatTokenizer, format: Format, ends: Iterable[int] = ()) -> None:
        self.format = format
        self._tokenizer = tokenizer
        # Our own copy: padding, truncation and split_special_tokens are state that other users of a tokenizer change.
        self._backend = deepcopy(tokenizer.backend_tokenizer)
        self._backend.no_padding()
        self._backend.no_truncation()
        self._tools: dict[int, tuple[Mapping[str, Tool], list[dict[str, Any]] | None]] = {}
        self._shapes: dict[tuple[int, _Shape], tuple[_Part, ...]] = {}
        self._scaffold = lru_cache(4096)(self._encode_scaffold)
        self._short = lru_cache(16384)(self._encode_plain)
        self._long = lru_cache(1024)(self._encode_plain)
        self._own = lru_cache(1024)(self._encode_own)
        self.control_ids = self._find_controls()
        self._control_strings = [self._backend.id_to_token(id) for id in sorted(self.control_ids)]
        self._end_id = self._find_end()
        self.stop_ids = tuple(sorted({self._end_id, tokenizer.eos_token_id, *ends} - {None}))

    # ------------------------------------------------------------ prompts

    def prompt_ids(self, messages: Sequence[Message], tools: Mapping[str, Tool] = _NO_TOOLS) -> tuple[int, ...]:
        """The whole prompt with one generation prompt at its end. ``tools`` must not change between calls."""
        shape = tuple((m.role, m.name, _thinking(m)) for m in messages)
        key = (id(tools), shape)
        parts = self._shapes.get(key)
        if parts is None:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            parts = self._shapes[key] = self._parts(shape, tools)
        ids: list[int] = []
        ended = False
        for kind, index, scaffold in parts:
            if kind:
                slot = self._slot(kind, messages[index])
                ids += slot
                ended = kind == "w" and messages[index].ids is not None and slot[-1:] == (self._end_id,)
            elif ended and scaffold[:1] == (self._end_id,):
                ids += scaffold[1:]  # the turn's end was sampled; it appears once
            else:
                ids += scaffold
        return tuple(ids)

    def _slot(self, kind: str, message: Message) -> tuple[int, ...]:
        if kind == "w":
            if message.ids is not None:
                return message.ids
            own = message.role in ("assistant", "system")
            return self._own(message.content) if own else self.encode(message.content)
        _, thought, rest = split_thought(message.content) or (False, "", message.content)
        return self._own(thought if kind == "t" else rest)

    def _parts(self, shape: _Shape, tools: Mapping[str, Tool]) -> tuple[_Part, ...]:
        """The template's rendering of a shape, cut into scaffold and slots."""
        text = self._render(shape, tools)
        for index, (_, _, thinking) in enumerate(shape):
            if thinking:
                text = re.sub(_kept_thought(index, thinking), f"\ue000w{index}\ue001", text)
        parts: list[_Part] = []
        position = 0
        for match in _PLACEHOLDER.finditer(text):
            parts.append(("", 0, self._scaffold(text[position : match.start()])))
            parts.append((match[1], int(match[2]), ()))
            position = match.end()
        parts.append(("", 0, self._scaffold(text[position:])))
        seen = {index for kind, index, _ in parts if kind}
        for index, (role, _, _) in enumerate(shape):
            if index not in seen:
                raise ConfigError(f"the chat template drops messages of role {role!r}; use one that renders them")
        return tuple(parts)

    def _render(self, shape: _Shape, tools: Mapping[str, Tool]) -> str:
        conversation = [
            {"role": role, "content": _placeholder(index, thinking)} | ({"name": name} if name else {})
            for index, (role, name, thinking) in enumerate(shape)
        ]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation, tools=self._schemas(tools), add_generation_prompt=True, tokenize=False
            )
        except ValueError as error:  # the tokenizer has no template
            raise ConfigError(f"the tokenizer cannot render a chat: {error}") from error
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "jinja2":
                raise
            roles = ", ".join(role for role, _, _ in shape)
            raise ConfigError(f"the chat template refuses the roles {roles}: {error}") from error
        return str(text)

    def _schemas(self, tools: Mapping[str, Tool]) -> list[dict[str, Any]] | None:
        """Tool descriptions as the template wants them. Keeping ``tools`` alive keeps its id unique."""
        if id(tools) not in self._tools:
            self._tools[id(tools)] = (tools, [self._schema(tool) for tool in tools.values()] or None)
        return self._tools[id(tools)][1]

    def _schema(self, tool: Tool) -> dict[str, Any]:
        function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
        text = json.dumps(function, ensure_ascii=False)
        for control in (*self._control_strings, "\ue000", "\ue001"):
            if control in text:
                raise ConfigError(f"the description of tool {tool.name!r} holds the control string {control!r}")
        return {"type": "function", "function": function}

    # ------------------------------------------------------------ text

    def encode(self, text: str) -> tuple[int, ...]:
        """Plain text: no id is in ``control_ids``, whatever the text says."""
        return self._short(text) if len(text) <= _LONG_TEXT else self._long(text)

    def encode_reply(self, reply: Reply | str) -> tuple[int, ...]:
        """The ids of a turn that says this, the end of turn included: what a scripted engine "samples"."""
        text = reply if isinstance(reply, str) else self.format.render(reply)
        return (*self._own(text), self._end_id)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a sampled turn: control tokens written out, the end of turn dropped."""
        body = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return str(self._backend.decode(list(body), skip_special_tokens=False))

    def parse(self, ids: Sequence[int], tools: Mapping[str, Tool] = _NO_TOOLS) -> Reply:
        """A sampled turn, read in the agent's format."""
        return self.format.parse(self.decode(ids), tools)

    def truncate(self, text: str, limit: int, side: Side) -> str:
        """``text`` cut at one side, or in its middle, to ``limit`` tokens at most. "left" keeps the tail."""
        if len(self.encode(text)) <= limit:
            return text
        mark = " ... " if side == "middle" else ""
        room = limit - len(self.encode(mark))
        while room > 0:
            short = self._cut(text, room, side, mark)
            excess = len(self.encode(short)) - limit
            if excess <= 0:
                return short
            room -= excess  # text can need more tokens once it is cut inside a word
        return ""

    def _cut(self, text: str, room: int, side: Side, mark: str) -> str:
        spans = self._spans(text)
        head = {"left": 0, "middle": (room + 1) // 2, "right": room}[side]
        tail = room - head
        start = text[: spans[head - 1][1]] if head else ""
        return start + mark + (text[spans[-tail][0] :] if tail else "")

    # ------------------------------------------------------------ encoding

    def _encode_scaffold(self, text: str) -> tuple[int, ...]:
        self._backend.encode_special_tokens = False
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        encoding = self._encoding(text)
        if self.control_ids.isdisjoint(encoding.ids):
            return tuple(encoding.ids)
        # Added tokens that are not marked special survive; cut through each and encode the pieces.
        spans = zip(encoding.ids, encoding.offsets, strict=True)
        pieces = _cut_through([span for id, span in spans if id in self.control_ids], text)
        return tuple(id for piece in pieces for id in self._encode_plain(piece))

    def _encode_own(self, text: str) -> tuple[int, ...]:
        """Text of the agent itself: the format's control strings are tokens where the vocabulary has them."""
        ids: list[int] = []
        for piece in self._own_controls.split(text):
            control = self._own_ids.get(piece)
            ids += self.encode(piece) if control is None else (control,)
        return tuple(ids)

    def _encoding(self, text: str) -> Any:
        self._backend.encode_special_tokens = True
        return self._backend.encode(text, add_special_tokens=False)

    def _spans(self, text: str) -> list[tuple[int, int]]:
        return list(self._encoding(text).offsets)

    # ------------------------------------------------------------ what the tokenizer has

    def _find_controls(self) -> frozenset[int]:
        added = {id: token.content for id, token in self._backend.get_added_tokens_decoder().items()}
        own = {control: self._backend.token_to_id(control) for control in self.format.controls}
        if self.format.closed and (missing := [control for control, id in own.items() if id is None]):
            raise ConfigError(f"the tokenizer lacks the control tokens {' '.join(missing)} of this call format")
        self._own_ids: dict[str, int] = {control: id for control, id in own.items() if id is not None}
        self._own_controls = re.compile("(" + "|".join(map(re.escape, self.format.controls)) + ")")
        # Runs of spaces are added tokens in some vocabularies; they, and single characters, control nothing.
        controls = {id for id, content in added.items() if len(content.strip()) > 1}
        return frozenset((controls | set(self._own_ids.values())) - {self._tokenizer.unk_token_id})

    def _find_end(self) -> int:
        """The token that closes an assistant's turn in the template, else the tokenizer's end of sequence."""
        parts = self._parts((("user", "", ""), ("assistant", "", ""), ("user", "", "")), _NO_TOOLS)
        after = next(i for i, (kind, index, _) in enumerate(parts) if kind and index == 1) + 1
        first = parts[after][2][:1]
        if first and first[0] in self.control_ids:
            return first[0]
        if self._tokenizer.eos_token_id is None:
            raise ConfigError("neither the chat template nor the tokenizer names a token that ends a turn")
        return int(self._tokenizer.eos_token_id)


def _thinking(message: Message) -> str:
    """How an assistant turn writes its thought: "" none, "open" with both tags, "closed" with the closing tag only."""
    if message.role != "assistant" or "</think>" not in message.content:
        return ""
    split = split_thought(message.content)
    return "" if split is None else "open" if split[0] else "closed"


def _placeholder(index: int, thinking: str) -> str:
    if not thinking:
        return f"\ue000w{index}\ue001"
    opening = "<think>\n" if thinking == "open" else ""
    return f"{opening}\ue000t{index}\ue001\n</think>\n\n\ue000r{index}\ue001"


def _kept_thought(index: int, thinking: str) -> str:
    """Matches a turn whose thought the template kept in its place; only white space around the tags may differ."""
    opening = r"<think>\s*" if thinking == "open" else ""
    return rf"{opening}\ue000t{index}\ue001\s*</think>\s*\ue000r{index}\ue001"


def _cut_through(spans: list[tuple[int, int]], text: str) -> list[str]:
    """``text`` cut one character into each span; spans of one character cannot be cut and are left out."""
    pieces: list[str] = []
    position = 0
    for start, end in spans:
        single = end - start <= 1
        pieces.append(text[position : start if single else start + 1])
        position = start + 1
    return [*pieces, text[position:]]
