"""Think -> call -> observe: endings, limits, mistakes, failures and sub-agents."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tiny_team import Lookup, Recorder, agent, compact_chat, run_alone, says

from mgrpo.agents.delegate import Delegate
from mgrpo.agents.loop import Agent
from mgrpo.engines.base import Completion, Request
from mgrpo.errors import EngineError, ToolError
from mgrpo.tools.base import CallContext
from mgrpo.types import Failure, Findings, Parent, ToolResult, TrajectoryId

SEARCH, ANSWER = "<call> search Zubora </call>", "<answer> Merova </answer>"


def echo(query: str, context: CallContext) -> str:
    return f"{query} is Merova"


def engine_of(agent: Agent) -> Recorder:
    assert isinstance(agent.engine, Recorder)
    return agent.engine


def test_a_call_an_observation_an_answer() -> None:
    planner = agent(says(SEARCH, ANSWER), Lookup(echo))
    trajectory, episode = run_alone(planner)
    first, last = trajectory.turns
    assert trajectory.ending == "answer" and trajectory.answer == Findings("Merova") and trajectory.valid_format
    assert trajectory.id == TrajectoryId(5, 2, "planner", 0) and trajectory.parent is None
    assert first.results == (ToolResult("Zubora is Merova"),) and last.results == ()
    decode = compact_chat()._backend.decode
    assert decode(list(last.context_ids), skip_special_tokens=False) == (
        "<|tool|> Zubora is Merova <|end|> <|assistant|>"
    )
    assert last.text == ANSWER and last.token_ids[-1] in compact_chat().stop_ids
    assert episode.trajectories == [trajectory] and engine_of(planner).released == [trajectory.id]


def test_only_sampled_ids_are_turn_ids() -> None:
    planner = agent(says(SEARCH, ANSWER), Lookup(echo))
    trajectory, _ = run_alone(planner)
    encode = compact_chat().encode_reply
    assert [turn.token_ids for turn in trajectory.turns] == [encode(SEARCH), encode(ANSWER)]
    assert [len(turn.token_ids) for turn in trajectory.turns] == [5, 4]  # header and observation are not among them


def test_a_mistake_is_recorded_told_and_survived() -> None:
    planner = agent(says("<call> fly Tarn </call>", "Merova", ANSWER), Lookup(echo))
    trajectory, _ = run_alone(planner)
    errors = [turn.reply.error for turn in trajectory.turns]
    assert errors[0] is not None and "unknown tool" in errors[0]
    assert errors[1] is not None and errors[2] is None
    last = engine_of(planner).batches[-1][0]
    assert [m.content for m in last.messages if m.role == "tool"] == ["error format", "error format"]
    assert trajectory.ending == "answer" and not trajectory.valid_format


def test_a_turn_cut_by_length_says_so() -> None:
    trajectory, _ = run_alone(agent(says(SEARCH, "<answer> a </answer>"), Lookup(echo), max_tokens_per_turn=3))
    first = trajectory.turns[0]
    assert first.stop_reason == "length" and len(first.token_ids) == 3
    assert first.reply.error == "</call> is missing (cut off after 3 tokens)"


def test_at_max_turns_one_forced_turn_whose_answer_counts() -> None:
    tool = Lookup(echo)
    planner = agent(says(SEARCH, SEARCH, ANSWER), tool, max_turns=2)
    trajectory, _ = run_alone(planner)
    assert [turn.forced for turn in trajectory.turns] == [False, False, True]
    assert trajectory.ending == "max_turns" and trajectory.answer == Findings("Merova") and trajectory.valid_format
    assert engine_of(planner).batches[-1][0].messages[-1].content == "answer now"


def test_calls_of_the_forced_turn_are_not_run() -> None:
    tool = Lookup(echo)
    trajectory, _ = run_alone(agent(says(SEARCH, SEARCH), tool, max_turns=1))
    assert len(tool.calls) == 1 and len(trajectory.turns) == 2
    assert trajectory.ending == "max_turns" and trajectory.answer is None


@pytest.mark.parametrize("limits", [{"max_turns": 0}, {"max_parallel_tool_calls": 0}])
def test_zero_calls_allowed_means_none(limits: dict[str, int]) -> None:
    tool = Lookup(echo)
    trajectory, _ = run_alone(agent(says(SEARCH, ANSWER, ANSWER), tool, **limits))
    assert tool.calls == []
    if "max_turns" not in limits:
        assert trajectory.turns[0].results[0].text == "error call"
        assert trajectory.turns[0].results[0].error == "a turn runs 0 calls at most (max_parallel_tool_calls)"
        assert trajectory.turns[0].reply.error is None


def test_more_calls_than_allowed_are_refused_in_place() -> None:
    tool = Lookup(echo)
    trajectory, _ = run_alone(agent(says(f"{SEARCH} {SEARCH} {SEARCH}", ANSWER), tool, max_parallel_tool_calls=2))
    assert [result.error is None for result in trajectory.turns[0].results] == [True, True, False]
    assert len(tool.calls) == 2


def test_at_max_context_the_forced_turn_still_fits() -> None:
    long = Lookup(lambda query, context: "Tarn " * 500)
    planner = agent(
        lambda request: SEARCH if request.messages[-1].content != "answer now" else ANSWER,
        long,
        max_turns=50,
        max_tokens_per_turn=8,
        max_context=100,
        max_tool_response_tokens=30,
    )
    trajectory, _ = run_alone(planner)
    assert trajectory.ending == "max_context" and trajectory.answer == Findings("Merova")
    assert trajectory.turns[-1].forced and 2 < len(trajectory.turns) < 6
    requests = [request for batch in engine_of(planner).batches for request in batch]
    assert all(len(request.prompt_ids) + 8 <= 100 for request in requests)
    assert requests[-1].sampling.max_tokens == 8
    seen = [m.content for m in requests[-1].messages if m.role == "tool"]
    assert seen == [result.text for turn in trajectory.turns for result in turn.results]


def test_a_task_that_fills_the_context_ends_without_a_turn() -> None:
    trajectory, _ = run_alone(agent(says(ANSWER), max_context=10))
    assert trajectory.ending == "max_context" and trajectory.turns == () and not trajectory.valid_format


def test_tool_responses_are_truncated_to_tokens() -> None:
    words = Lookup(lambda query, context: "Tarn " * 20 + "Merova \ud800")
    trajectory, _ = run_alone(
        agent(says(SEARCH, ANSWER), words, max_tool_response_tokens=4, truncate_side="left"),
    )
    assert trajectory.turns[0].results[0].text == "Tarn Tarn Merova ?"


def test_a_broken_tool_leaves_the_trajectory_without_a_reward() -> None:
    def broken(query: str, context: CallContext) -> str:
        raise ToolError("the index is gone")

    trajectory, _ = run_alone(agent(says(SEARCH, ANSWER), Lookup(broken)))
    failure = Failure("ToolError", "the index is gone")
    assert trajectory.turns[0].results == (ToolResult("tool failed", failure=failure),)
    assert trajectory.failure == failure and trajectory.ending == "answer"  # the rollout goes on


def test_a_slow_tool_meets_its_deadline() -> None:
    slow = Lookup(echo, seconds=5.0)
    trajectory, _ = run_alone(agent(says(SEARCH, ANSWER), slow, tool_timeout_s=0.01))
    failure = trajectory.failure
    assert failure is not None and failure.kind == "ToolTimeout"
    assert failure.message == "tool search of g5/r2/planner/0 gave no result after 0.01 s"


def test_a_bug_in_a_tool_is_a_traceback() -> None:
    def bug(query: str, context: CallContext) -> str:
        raise ZeroDivisionError("ours")

    for calls in (SEARCH, f"{SEARCH} {SEARCH}"):
        with pytest.raises(ZeroDivisionError, match="ours"):
            run_alone(agent(says(calls, ANSWER), Lookup(bug)))


class Broken(Recorder):
    """Fails, or returns what is no evidence of sampling."""

    def __init__(self, completion: Completion | None) -> None:
        super().__init__(says())
        self._completion = completion

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        if self._completion is None:
            raise EngineError("out of memory")
        return [self._completion]


@pytest.mark.parametrize(
    ("completion", "kind"),
    [
        (None, "EngineError"),
        (Completion((), (), 0, "stop"), "EngineError"),
        (Completion((1,), (-9999.0,), 0, "stop"), "SamplingEvidenceError"),
        (Completion((1,), (float("nan"),), 0, "stop"), "SamplingEvidenceError"),
        (Completion((1,), (0.5,), 0, "stop"), "SamplingEvidenceError"),
    ],
)
def test_a_broken_engine_ends_the_trajectory_as_a_failure(completion: Completion | None, kind: str) -> None:
    engine = Broken(completion)
    trajectory, episode = run_alone(Agent("planner", compact_chat(), engine))
    assert trajectory.ending == "failure" and trajectory.failure is not None and trajectory.failure.kind == kind
    assert engine.released == [trajectory.id] and episode.trajectories == [trajectory]


# ---------------------------------------------------------------- sub-agents

ASK = "<call> searcher capital of Zubora <arg> the population </call>"


def searcher(*turns: str, **limits: int) -> Agent:
    return agent(says(*turns), Lookup(echo), name="searcher", **limits)


def test_a_delegated_task_becomes_a_child_and_its_findings_an_observation() -> None:
    sub = searcher(SEARCH, "<answer> Merova <source> p12 </answer>")
    trajectory, episode = run_alone(agent(says(ASK, ANSWER), Delegate(sub)))
    child = episode.trajectories[0]
    assert child.id == TrajectoryId(5, 2, "searcher", 0) and child.parent == Parent(trajectory.id, 0, 0)
    assert (child.task, child.context) == ("capital of Zubora", "the population")
    assert engine_of(sub).batches[0][0].messages[0].content == "capital of Zubora\n\ncontext: the population"
    assert trajectory.turns[0].results == (ToolResult("Merova from p12"),)


def test_ids_are_given_in_call_order_whatever_ends_first() -> None:
    waits = {"Tarn": 0.03, "Merova": 0.0}

    async def slow_or_fast(seconds: float) -> None:
        await asyncio.sleep(seconds)

    class Uneven(Lookup):
        async def __call__(self, arguments, context):  # type: ignore[no-untyped-def]
            await slow_or_fast(waits[arguments["query"]])
            return ToolResult(arguments["query"])

    def script(request: Request) -> str:
        if len(request.messages) == 1:
            return f"<call> search {request.messages[0].content} </call>"
        return f"<answer> {request.messages[-1].content} </answer>"

    sub = agent(script, Uneven(echo), name="searcher")
    both = "<call> searcher Tarn </call> <call> searcher Merova </call>"
    trajectory, episode = run_alone(agent(says(both, ANSWER), Delegate(sub)))
    tasks = {t.id.invocation: t.task for t in episode.trajectories if t.id.agent == "searcher"}
    assert tasks == {0: "Tarn", 1: "Merova"}
    assert [result.text for result in trajectory.turns[0].results] == ["Tarn", "Merova"]


def test_a_child_without_an_answer() -> None:
    sub = searcher("Merova", "Merova", max_turns=1)
    trajectory, _ = run_alone(agent(says(ASK, ANSWER), Delegate(sub)))
    assert trajectory.turns[0].results == (ToolResult("no answer"),) and trajectory.failure is None


def test_a_failed_child_is_a_failure_of_the_parent_that_relied_on_it() -> None:
    sub = Agent("searcher", compact_chat(), Broken(None))
    trajectory, episode = run_alone(agent(says(ASK, ANSWER), Delegate(sub)))
    failure = Failure("EngineError", "out of memory")
    assert [t.failure for t in episode.trajectories] == [failure, failure]
    assert trajectory.ending == "answer" and trajectory.turns[0].results[0].text == "no answer"


def test_a_child_that_answers_in_spite_of_a_broken_tool_is_no_failure_of_the_parent() -> None:
    def broken(query: str, context: CallContext) -> str:
        raise ToolError("down")

    sub = agent(says(SEARCH, ANSWER), Lookup(broken), name="searcher")
    trajectory, episode = run_alone(agent(says(ASK, ANSWER), Delegate(sub)))
    assert episode.trajectories[0].failure is not None and trajectory.failure is None


def test_any_depth_within_the_budgets() -> None:
    third = agent(says("<answer> Tarn </answer>"), name="reader")
    second = agent(says("<call> reader Tarn </call>", ANSWER), Delegate(third), name="searcher")
    root = agent(says(ASK, ASK, ANSWER), Delegate(second))
    _, episode = run_alone(root)
    assert [str(t.id) for t in sorted(episode.trajectories, key=lambda t: t.id)] == [
        "g5/r2/planner/0",
        "g5/r2/reader/0",
        "g5/r2/reader/1",
        "g5/r2/searcher/0",
        "g5/r2/searcher/1",
    ]
    _, shallow = run_alone(root, max_depth=1)
    assert {t.id.agent for t in shallow.trajectories} == {"planner", "searcher"}
    refusal = shallow.trajectories[0].turns[0].results[0]
    assert (refusal.text, refusal.error) == ("error call", "reader would be 2 levels below the root; max_depth is 1")
    trajectory, few = run_alone(root, max_calls=2)
    assert len(few.trajectories) == 3
    assert trajectory.turns[1].results[0].error == "the rollout has used its 2 sub-agent calls (max_calls)"


def test_a_delegate_works_inside_an_episode_only() -> None:
    delegate = Delegate(searcher())
    context = CallContext(TrajectoryId(0, 0, "planner", 0), 0, 0, run_alone(searcher(ANSWER))[1].task, None)
    with pytest.raises(TypeError, match="outside of an episode"):
        asyncio.run(delegate({"task": "Tarn"}, context))
