"""Call formats: what a sampled turn says, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mgrpo.agents.formats import Compact, Hermes, split_thought
from mgrpo.types import Findings, Reply, ToolCall


class Declared:
    """A tool as a format sees it: a name and a schema."""

    def __init__(self, name: str, required: list[str], **properties: object) -> None:
        self.name = name
        self.description = name
        self.parameters = {"type": "object", "properties": properties, "required": required}


STRING = {"type": "string"}
TOOLS = {
    tool.name: tool
    for tool in (
        Declared("search", ["query"], query={"type": ["string", "array"], "items": STRING}, k={"type": "integer"}),
        Declared("searcher", ["task"], context=STRING, task=STRING),
        Declared("rank", ["list"], list={"type": "array", "items": {"type": "integer"}}, how={"enum": ["up", "down"]}),
        Declared("now", []),
    )
}
HERMES, COMPACT = Hermes(), Compact()


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name, arguments)


def hermes(value: object) -> str:
    return f"<tool_call>\n{value if isinstance(value, str) else json.dumps(value)}\n</tool_call>"


@pytest.mark.parametrize(
    ("format", "reply"),
    [
        (HERMES, Reply(calls=(call("search", query="capital of Zubora"),))),
        (HERMES, Reply("two at once", (call("search", query=["a", "b"], k=3), call("now")))),
        (HERMES, Reply(answer=Findings("4120"))),
        (HERMES, Reply("sure", answer=Findings("Merova", "it says so", ("https://web.local/a", "b")))),
        (HERMES, Reply(answer=Findings('{"answer": "a literal"}'))),
        (HERMES, Reply(calls=(call("search", query="</tool_call> <answer>x</answer> </think>"),))),
        (COMPACT, Reply(calls=(call("searcher", task="capital of Zubora"),))),
        (COMPACT, Reply("hm", (call("searcher", task="capital of Tarn", context="river of Tarn"), call("now")))),
        (COMPACT, Reply(calls=(call("search", query="Tarn", k=3),))),
        (COMPACT, Reply(answer=Findings("4120", sources=("p12", "p7")))),
        (COMPACT, Reply(answer=Findings("4120 , 17", "Merova : population 4120 .", ("p12",)))),
    ],
)
def test_a_rendered_reply_reads_back_as_itself(format: Hermes | Compact, reply: Reply) -> None:
    assert format.parse(format.render(reply), TOOLS) == reply


def test_hermes_arguments_given_as_a_json_string_are_decoded() -> None:
    reply = HERMES.parse(hermes({"name": "search", "arguments": '{"query": "Zubora"}'}), TOOLS)
    assert reply.calls == (call("search", query="Zubora"),)


def test_hermes_text_around_a_call_is_its_thought() -> None:
    reply = HERMES.parse("Let me look.\n" + hermes({"name": "now"}), TOOLS)
    assert reply == Reply("Let me look.", (call("now"),))


def test_hermes_does_not_read_calls_inside_a_thought() -> None:
    text = "<think>\nmaybe <tool> or answer\n</think>\n\n<answer> 7 </answer>"
    assert HERMES.parse(text, TOOLS) == Reply("maybe <tool> or answer", answer=Findings("7"))


def test_hermes_thought_opened_by_the_prompt() -> None:
    assert HERMES.parse("so it is\n</think>\n\n<answer>7</answer>", TOOLS) == Reply("so it is", answer=Findings("7"))
    assert split_thought("so it is\n</think>\n\nyes") == (False, "so it is", "yes")
    assert split_thought("before <think>a</think>b") is None


def test_hermes_answer_as_json() -> None:
    text = '<answer>{"answer": 4120, "evidence": "page", "sources": ["p12"]}</answer>'
    assert HERMES.parse(text, TOOLS).answer == Findings("4120", "page", ("p12",))
    assert HERMES.parse("<answer>{1, 2}</answer>", TOOLS).answer == Findings("{1, 2}")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Paris", "neither a tool call nor an answer"),
        ("", "neither"),
        ("<answer> </answer>", "the answer is empty"),
        ("<answer>Paris", "</answer> is missing"),
        ("<answer>a</answer><answer>b</answer>", "one answer at most"),
        ("<answer>a</answer>" + hermes({"name": "now"}), "not both"),
        ("<think>hm <answer>a</answer>", "<think> is not closed"),
        ("a </tool_call>", "without its opening tag"),
        ('<tool_call>{"name": "now"}', "</tool_call> is missing"),
        (hermes("{'name': 'now'}"), "not valid JSON"),
        (hermes('{"name": "now"} {}'), "</tool_call> is missing after"),
        (hermes("[" * 100_000), "nested too deeply"),
        (hermes('{"name": "search", "arguments": {"query": "\\ud800"}}'), "not valid JSON"),
        (hermes('{"name": "search", "arguments": {"query": "a", "k": NaN}}'), "not valid JSON"),
        (hermes('{"name": "search", "arguments": {"query": "a", "k": 1e999}}'), "not valid JSON"),
        (hermes('{"name": "search", "arguments": {"query": "a", "k": 99999999999999999999}}'), "64 bits"),
        (hermes('["now"]'), 'a JSON object with "name"'),
        (hermes({"name": "now", "arguments": "{"}), "arguments of now are not valid JSON"),
        (hermes({"name": "now", "arguments": [1]}), "must be a JSON object"),
        (hermes({"name": "fly"}), "unknown tool fly; the tools are: search, searcher, rank, now"),
        (hermes({"name": "search"}), "search: argument query is missing"),
        (hermes({"name": "search", "arguments": {"query": 3}}), "query must be of type string or array"),
        (hermes({"name": "search", "arguments": {"query": ["a", 3]}}), "query must be of type string"),
        (hermes({"name": "search", "arguments": {"query": "a", "k": True}}), "k must be of type integer"),
        (hermes({"name": "search", "arguments": {"query": "a", "j": 1}}), "unknown argument 'j'"),
        (hermes({"name": "rank", "arguments": {"list": [1], "how": "left"}}), "must be one of up, down"),
        ('<answer>{"answer": ["a"]}</answer>', "must be strings"),
        ('<answer>{"answer": "a", "sources": "p1"}</answer>', '"sources" must be a list'),
    ],
)
def test_hermes_mistakes(text: str, error: str) -> None:
    reply = HERMES.parse(text, TOOLS)
    assert reply.error is not None and error in reply.error
    assert not reply.calls and reply.answer is None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Merova", "neither"),
        ("<answer> </answer>", "the answer is empty"),
        ("<answer> Merova", "</answer> is missing"),
        ("<call> search Tarn", "</call> is missing"),
        ("<call> </call>", "names no tool"),
        ("<call> fly Tarn </call>", "unknown tool fly"),
        ("<call> search </call>", "argument query is missing"),
        ("<call> search Tarn <arg> many </call>", "k must be of type integer"),
        ("<call> search a <arg> 1 <arg> 2 </call>", "takes 2 arguments, not 3"),
        ("<call> search <source> p1 </call>", "<source> is out of place"),
        ("<call> search a <call> search b </call>", "<call> is out of place"),
        ("<answer> a </answer> b", "expected <call> or <answer>, found b"),
        ("</call> a", "expected <call> or <answer>, found </call>"),
        ("<answer> a </answer> <call> search b </call>", "not both"),
        ("<answer> a </answer> <answer> b </answer>", "one answer at most"),
    ],
)
def test_compact_mistakes(text: str, error: str) -> None:
    reply = COMPACT.parse(text, TOOLS)
    assert reply.error is not None and error in reply.error
    assert not reply.calls and reply.answer is None


def test_compact_puts_the_first_required_property_first() -> None:
    reply = COMPACT.parse("<call> searcher capital of Tarn <arg> river </call>", TOOLS)
    assert reply.calls == (call("searcher", task="capital of Tarn", context="river"),)


def test_arguments_are_parsed_and_never_evaluated(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    evil = f'__import__("os").system("touch {marker}")'
    bad = HERMES.parse(f'<tool_call>{{"name": "rank", "arguments": {{"list": {evil}}}}}</tool_call>', TOOLS)
    assert bad.error is not None and "not valid JSON" in bad.error
    quoted = HERMES.parse(hermes({"name": "rank", "arguments": {"list": evil}}), TOOLS)
    assert quoted.error is not None and "must be of type array" in quoted.error
    assert not marker.exists()
    good = HERMES.parse(hermes({"name": "rank", "arguments": {"list": [1, 2, 3]}}), TOOLS)
    assert good.calls == (call("rank", list=[1, 2, 3]),)


def test_findings_and_complaints_are_plain_text() -> None:
    findings = Findings("Merova", "a page", ("p12", "p7"))
    assert COMPACT.findings(findings) == "Merova : a page from p12 from p7"
    assert COMPACT.findings(Findings("Merova", sources=("p12",))) == "Merova from p12"
    assert json.loads(HERMES.findings(findings)) == {
        "answer": "Merova",
        "evidence": "a page",
        "sources": ["p12", "p7"],
    }
    assert COMPACT.complaint("</call> is missing", "format") == "error format"
    assert HERMES.complaint("</tool_call> is missing", "format") == "error: </tool_call> is missing"
