"""Call formats: how an agent writes tool calls and answers, and how its sampled text is read back.

A format is a pair of pure functions over text. ``parse`` is only ever applied to what a model sampled, never to tool
output, and reads arguments with a JSON parser: nothing is evaluated.

=========  =============================================================  ======================================
format     a turn that calls                                              a turn that answers
=========  =============================================================  ======================================
hermes     ``<tool_call>{"name": "search", "arguments": {..}}</tool_call>``  ``<answer>Paris</answer>``
compact    ``<call> search capital of Zubora </call>``                    ``<answer> Merova <source> p12 </answer>``
=========  =============================================================  ======================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

from mgrpo.agents.schema import argument_error, from_text
from mgrpo.tools.base import Tool
from mgrpo.types import Findings, Reply, ToolCall

About = Literal["format", "call"]  # what an error is about: the shape of a turn, or one call of it


class Format(Protocol):
    """Three kinds of text: what the agent writes, what it reads of sub-agents, what it reads of its own mistakes."""

    @property
    def controls(self) -> tuple[str, ...]:
        """The strings that carry structure."""
        ...

    @property
    def closed(self) -> bool:
        """Whether each control string must be one token of the vocabulary."""
        ...

    def render(self, reply: Reply) -> str:
        """The text of a turn; ``parse(render(reply), tools) == reply`` for a reply without error."""
        ...

    def parse(self, text: str, tools: Mapping[str, Tool]) -> Reply:
        """A sampled turn, read. What is malformed comes back as ``Reply.error``; nothing is raised."""
        ...

    def findings(self, findings: Findings) -> str:
        """What a parent reads of a sub-agent's findings: plain text, free of ``controls``."""
        ...

    def complaint(self, error: str, about: About) -> str:
        """What the model reads of its own mistake."""
        ...


class _Malformed(Exception):
    """Carries the message of a parse error to the edge of `parse`."""


def split_thought(text: str) -> tuple[bool, str, str] | None:
    """(opened, thought, rest) of ``<think>thought</think>rest``; None where the text has no finished thought.

    ``opened`` is False when the opening tag was part of the prompt, as in templates that prefill it. A closing tag
    behind the first call or answer belongs to that call's text.
    """
    head, tag, rest = text.partition("</think>")
    if not tag or "<tool_call>" in head or "<answer>" in head:
        return None
    opening, opened, thought = head.partition("<think>")
    if opened and not opening.strip():
        return True, thought.strip(), rest.lstrip()
    return (False, head.strip(), rest.lstrip()) if not opened else None


# ---------------------------------------------------------------- hermes


@dataclass(frozen=True)
class Hermes:
    """The JSON calls of Hermes and Qwen models, with the answer in ``<answer>`` tags, plain or as a JSON object."""

    controls: tuple[str, ...] = ("<tool_call>", "</tool_call>", "<answer>", "</answer>", "<think>", "</think>")
    closed: bool = False

    def render(self, reply: Reply) -> str:
        blocks = [_call_json(call) for call in reply.calls]
        if reply.answer is not None:
            blocks.append(f"<answer>{_answer_text(reply.answer)}</answer>")
        thought = f"<think>\n{reply.thought}\n</think>\n\n" if reply.thought else ""
        return thought + "\n".join(blocks)

    def parse(self, text: str, tools: Mapping[str, Tool]) -> Reply:
        split = split_thought(text)
        thought, body = (split[1], split[2]) if split else ("", text)
        try:
            if split is None and body.lstrip().startswith("<think>"):
                _malformed("<think> is not closed")
            outside, calls, answers = _hermes_blocks(body, tools)
        except _Malformed as error:
            return Reply(thought=thought, error=str(error))
        return _reply(thought or outside, calls, answers)

    def findings(self, findings: Findings) -> str:
        value = {"answer": findings.answer, "evidence": findings.evidence, "sources": list(findings.sources)}
        return json.dumps(value, ensure_ascii=False)

    def complaint(self, error: str, about: About) -> str:
        return f"error: {error}"


def _call_json(call: ToolCall) -> str:
    value = {"name": call.name, "arguments": dict(call.arguments)}
    return f"<tool_call>\n{json.dumps(value, ensure_ascii=False)}\n</tool_call>"


def _answer_text(findings: Findings) -> str:
    plain = findings.answer
    if findings.evidence or findings.sources or _json_object(plain) is not None:
        value: dict[str, Any] = {"answer": plain}
        if findings.evidence:
            value["evidence"] = findings.evidence
        if findings.sources:
            value["sources"] = list(findings.sources)
        return json.dumps(value, ensure_ascii=False)
    return plain


_HERMES_OPENING = re.compile(r"<(?:tool_call|answer)>")


def _hermes_blocks(text: str, tools: Mapping[str, Tool]) -> tuple[str, list[ToolCall], list[Findings]]:
    """The text outside of all tags, the calls and the answers, read from left to right."""
    outside: list[str] = []
    calls: list[ToolCall] = []
    answers: list[Findings] = []
    position = 0
    while opening := _HERMES_OPENING.search(text, position):
        outside.append(text[position : opening.start()])
        if opening.group() == "<answer>":
            content, position = _until(text, opening.end(), "</answer>")
            answers.append(_hermes_answer(content))
        else:
            value, position = _json_until(text, opening.end(), "</tool_call>")
            calls.append(_hermes_call(value, tools))
    outside.append(text[position:])
    rest = "\n".join(part.strip() for part in outside if part.strip())
    for tag in ("</tool_call>", "</answer>"):
        if tag in rest:
            _malformed(f"{tag} without its opening tag")
    return rest, calls, answers


def _until(text: str, start: int, tag: str) -> tuple[str, int]:
    end = text.find(tag, start)
    if end < 0:
        _malformed(f"{tag} is missing")
    return text[start:end].strip(), end + len(tag)


_WHITE = re.compile(r"\s*")


def _json_until(text: str, start: int, tag: str) -> tuple[Any, int]:
    """One JSON value and the closing tag; a tag inside a JSON string does not close anything."""
    start = _end_of_white(text, start)
    try:
        value, end = _decode(text, start)
    except ValueError as error:
        if text.find(tag, start) < 0:
            _malformed(f"{tag} is missing")
        _malformed(f"the call is not valid JSON: {error}")
    end = _end_of_white(text, end)
    if not text.startswith(tag, end):
        _malformed(f"{tag} is missing after the JSON object of the call")
    return value, end + len(tag)


def _end_of_white(text: str, start: int) -> int:
    match = _WHITE.match(text, start)
    return match.end() if match else start


def _integer(digits: str) -> int:
    value = int(digits)
    if not -(2**63) <= value < 2**63:
        raise ValueError("an integer has more than 64 bits")
    return value


_DECODER = json.JSONDecoder(parse_int=_integer)


def _decode(text: str, start: int = 0) -> tuple[Any, int]:
    """One JSON value that any store can hold, and where it ends: no NaN, no infinity, no half of a surrogate pair."""
    try:
        value, end = _DECODER.raw_decode(text, start)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value, end


def _decode_all(text: str) -> Any:
    value, end = _decode(text, _end_of_white(text, 0))
    if text[end:].strip():
        raise ValueError("there is text after the JSON value")
    return value


def _json_object(text: str) -> dict[str, Any] | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        value = _decode_all(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _hermes_call(value: Any, tools: Mapping[str, Tool]) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        _malformed('a call must be a JSON object with "name" and "arguments"')
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # some models write the arguments as a string that holds JSON
        try:
            arguments = _decode_all(arguments)
        except ValueError as error:
            _malformed(f"the arguments of {value['name']} are not valid JSON: {error}")
    if not isinstance(arguments, dict):
        _malformed(f"the arguments of {value['name']} must be a JSON object")
    return _checked(ToolCall(value["name"], arguments), tools)


def _hermes_answer(text: str) -> Findings:
    value = _json_object(text)
    if value is None or "answer" not in value:
        return Findings(text)
    answer, evidence, sources = value["answer"], value.get("evidence", ""), value.get("sources", [])
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = json.dumps(answer)
    if not isinstance(answer, str) or not isinstance(evidence, str):
        _malformed('"answer" and "evidence" must be strings')
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        _malformed('"sources" must be a list of strings')
    return Findings(answer.strip(), evidence, tuple(sources))


# ---------------------------------------------------------------- compact


@dataclass(frozen=True)
class Compact:
    """For closed vocabularies: every control string is one token, words are separated by single spaces.

    The first word of a call is the tool, the rest its first required property; further properties follow in schema
    order, separated by ``<arg>``.
    """

    controls: tuple[str, ...] = ("<call>", "</call>", "<answer>", "</answer>", "<arg>", "<source>", "<evidence>")
    closed: bool = True

    def render(self, reply: Reply) -> str:
        parts = [reply.thought] if reply.thought else []
        for call in reply.calls:
            values = " <arg> ".join(str(value) for value in call.arguments.values())
            parts.append(f"<call> {call.name} {values} </call>")
        if reply.answer is not None:
            evidence = f" <evidence> {reply.answer.evidence}" if reply.answer.evidence else ""
            sources = "".join(f" <source> {source}" for source in reply.answer.sources)
            parts.append(f"<answer> {reply.answer.answer}{evidence}{sources} </answer>")
        return " ".join(parts)

    def parse(self, text: str, tools: Mapping[str, Tool]) -> Reply:
        words = text.split()
        first = next((i for i, word in enumerate(words) if word in self.controls), len(words))
        thought = " ".join(words[:first])
        try:
            calls, answers = self._blocks(words[first:], tools)
        except _Malformed as error:
            return Reply(thought=thought, error=str(error))
        return _reply(thought, calls, answers)

    def findings(self, findings: Findings) -> str:
        said = f"{findings.answer} : {findings.evidence}" if findings.evidence else findings.answer
        return " from ".join((said, *findings.sources))

    def complaint(self, error: str, about: About) -> str:
        return f"error {about}"  # the full message is recorded; a closed vocabulary has words for no more than this

    def _blocks(self, words: list[str], tools: Mapping[str, Tool]) -> tuple[list[ToolCall], list[Findings]]:
        calls: list[ToolCall] = []
        answers: list[Findings] = []
        while words:
            if words[0] not in ("<call>", "<answer>"):
                _malformed(f"expected <call> or <answer>, found {words[0]}")
            closing = words[0].replace("<", "</")
            if closing not in words:
                _malformed(f"{closing} is missing")
            end = words.index(closing)
            if words[0] == "<call>":
                calls.append(_compact_call(self._fields(words[1:end], ("<arg>",)), tools))
            else:
                answers.append(_compact_answer(self._fields(words[1:end], ("<source>", "<evidence>"))))
            words = words[end + 1 :]
        return calls, answers

    def _fields(self, words: list[str], separators: tuple[str, ...]) -> list[tuple[str, str]]:
        """[(separator before it, text)], the first with separator "" and perhaps no text."""
        fields: list[tuple[str, list[str]]] = [("", [])]
        for word in words:
            if word in separators:
                fields.append((word, []))
            elif word in self.controls:
                _malformed(f"{word} is out of place")
            else:
                fields[-1][1].append(word)
        return [(separator, " ".join(text)) for separator, text in fields]


def _compact_call(fields: list[tuple[str, str]], tools: Mapping[str, Tool]) -> ToolCall:
    name, _, head = fields[0][1].partition(" ")
    if not name:
        _malformed("a call names no tool")
    if name not in tools:
        _malformed(_unknown(name, tools))
    schema = tools[name].parameters
    values = [head, *(text for _, text in fields[1:])]
    while values and not values[-1]:
        values.pop()
    names = _property_order(schema)
    if len(values) > len(names):
        _malformed(f"{name} takes {len(names)} arguments, not {len(values)}")
    properties = schema.get("properties", {})
    arguments = {key: from_text(text, properties[key]) for key, text in zip(names, values, strict=False) if text}
    return _checked(ToolCall(name, arguments), tools)


def _property_order(schema: Mapping[str, Any]) -> list[str]:
    required = list(schema.get("required", ()))[:1]
    return required + [key for key in schema.get("properties", {}) if key not in required]


def _compact_answer(fields: list[tuple[str, str]]) -> Findings:
    evidence = " ".join(text for separator, text in fields if separator == "<evidence>")
    sources = tuple(text for separator, text in fields if separator == "<source>" and text)
    return Findings(fields[0][1], evidence, sources)


# ---------------------------------------------------------------- shared by both


def _malformed(message: str) -> NoReturn:
    raise _Malformed(message)


def _unknown(name: str, tools: Mapping[str, Tool]) -> str:
    return f"unknown tool {name}; the tools are: {', '.join(tools) or 'none'}"


def _checked(call: ToolCall, tools: Mapping[str, Tool]) -> ToolCall:
    if call.name not in tools:
        _malformed(_unknown(call.name, tools))
    if error := argument_error(call.arguments, tools[call.name].parameters):
        _malformed(f"{call.name}: {error}")
    return call


def _reply(thought: str, calls: list[ToolCall], answers: list[Findings]) -> Reply:
    if calls and answers:
        return Reply(thought, error="a turn either calls tools or answers, not both")
    if len(answers) > 1:
        return Reply(thought, error="a turn has one answer at most")
    if answers and not answers[0].answer.strip():
        return Reply(thought, error="the answer is empty")
    if not calls and not answers:
        return Reply(thought, error="neither a tool call nor an answer")
    return Reply(thought, tuple(calls), answers[0] if answers else None)


FORMATS: Mapping[str, Format] = {"hermes": Hermes(), "compact": Compact()}
