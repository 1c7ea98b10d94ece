"""Cases of other trainers' trackers about masks, tokens and templates, with their right values.

Those that need a conversation are held by a whole one: an agent in its loop, and the rows that come of it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import plain_logprobs, tiny_model
from tiny_rows import row_of
from tiny_team import TASK, Lookup, Recorder, agent, run_alone, says, turn_of
from tiny_tokenizer import CONTROLS, TEXT, chatml_tokenizer

from mgrpo.agents import rollout as rollouts
from mgrpo.agents.chat import Chat, Side
from mgrpo.agents.delegate import Delegate
from mgrpo.agents.formats import Hermes
from mgrpo.agents.loop import Agent, Limits
from mgrpo.agents.rollout import Team, run_groups
from mgrpo.agents.scheduler import Lockstep
from mgrpo.algorithm.alignment import align, rows_of
from mgrpo.algorithm.loss import Objective, objective_loss
from mgrpo.algorithm.packing import Batch, pack
from mgrpo.algorithm.rewards import rewards
from mgrpo.config import TinyModel
from mgrpo.engines.base import Completion, Request, Sampling
from mgrpo.engines.decode import Decoder
from mgrpo.engines.local import Settings
from mgrpo.engines.scripted import Scripted
from mgrpo.errors import SamplingEvidenceError
from mgrpo.policy.step import penalised
from mgrpo.policy.tiny import write_tiny
from mgrpo.policy.update import score
from mgrpo.team import chat_of
from mgrpo.types import Grade, Reply, Reward, Rollout, Row, Sample, Trajectory, TrajectoryId, Turn

ID = TrajectoryId(0, 0, "a", 0)
EOS = 1


def packed(*rows: Row, pad_id: int = 0) -> Batch:
    (batch,) = pack(rows, [(1.0,) * len(row.turns) for row in rows], [1.0] * len(rows), 10_000, pad_id)
    return batch


def test_the_end_of_a_turn_is_trained_and_padding_is_not_though_they_are_one_token() -> None:
    """R-12: [5, 6, EOS, PAD, PAD] with PAD == EOS -> [1, 1, 1, 0, 0], by position."""
    short = row_of(ID, (9, 5, 6, EOS), (False, True, True, True))
    long = row_of(replace(ID, rollout=1), (9, 5, 6, 5, 6, EOS), (False, True, True, True, True, True))
    batch = packed(long, short, pad_id=EOS)
    assert batch.input_ids[1].tolist() == [9, 5, 6, EOS, EOS, EOS]
    assert batch.targets[1, 1:].tolist() == [True, True, True, False, False]


def test_a_turn_stops_at_any_of_its_end_tokens_and_no_later_token_is_sampled() -> None:
    """R-12: end ids {2, 7}, tokens [5, 7, 2] stop at 7 -> mask [1, 1, 0]: what would follow is never there."""
    decoder = Decoder(tiny_model())
    request = Request(ID, (3, 4, 5), Sampling(1.0, 6, seed=3), ())
    (free,) = decoder.decode([request], 0)
    second = free.token_ids[1]
    assert second != free.token_ids[0]
    (stopped,) = decoder.decode([replace(request, stop_ids=(second, 63))], 0)
    assert stopped.token_ids == free.token_ids[:2] and stopped.stop_reason == "stop"


def test_a_turn_stops_at_every_end_that_the_model_folder_declares(tmp_path: Path) -> None:
    """R-12: end ids {2, 7} of a generation_config.json, as Qwen3 and Llama 3 have them, both end a turn."""
    shape = TinyModel(type="tiny", hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2)
    write_tiny(tmp_path, shape, TEXT.split(), CONTROLS, seed=0)

    def sample() -> tuple[int, ...]:
        chat = chat_of(tmp_path, "compact")
        request = Request(ID, (3, 4, 5), Sampling(1.0, 6, seed=3), chat.stop_ids)
        return asyncio.run(Settings().build(tmp_path).generate([request]))[0].token_ids

    free = sample()
    assert len(free) == 6 and free[1] != free[0]
    declared = tmp_path / "generation_config.json"
    ends = json.loads(declared.read_text())
    declared.write_text(json.dumps(ends | {"eos_token_id": [ends["eos_token_id"], free[1]]}))
    assert sample() == free[:2]


def test_tool_tokens_are_in_no_loss_no_kl_and_no_length() -> None:
    """R-13: turns of 4 sampled, 3 tool and 5 sampled tokens -> 9 targets, a KL sum over 9, a length of 9 (span 12)."""
    turns = (
        Turn((9,), (3, 4, 5, 6), (-1.0,) * 4, 0, "stop", "", Reply()),
        Turn((7, 7, 7), (3, 4, 5, 6, 8), (-1.0,) * 5, 0, "stop", "", Reply()),
    )
    (row,) = rows_of(Sample(Trajectory(ID, "t", turns, "answer"), Reward(1.0)))
    batch = packed(row)
    assert (row.sampled, len(row.token_ids) - 1, int(batch.targets.sum())) == (9, 12, 9)
    batch = replace(batch, ref_logprobs=torch.full((9,), -1.5))
    new = torch.full((9,), -1.0)
    loss, sums = objective_loss(new, torch.zeros(9), batch, Objective("reinforce", kl_coef=1.0, kl_estimator="k1"))
    assert sums.tokens == 9 and sums.sums["kl"] == pytest.approx(9 * 0.5)
    assert loss.item() == pytest.approx(9 * (1.0 + 0.5))
    model = tiny_model()
    (less,) = penalised([row], model, 1.0, 0.1, "k1", 1000, 0)
    there = plain_logprobs(model, row.token_ids)[torch.tensor(row.loss_mask[1:])]
    assert less.reward == pytest.approx(1.0 - 0.1 * float((-1.0 - there).sum()), abs=1e-4)


def test_a_mask_over_predictions_is_the_token_mask_without_its_first_place() -> None:
    """R-14: tokens [10, 11, 12, 13], token mask [0, 0, 1, 0] -> [0, 1, 0] over predictions, scoring token 12."""
    batch = packed(row_of(ID, (10, 11, 12, 13), (False, False, True, False), (0.0, 0.0, -0.7, 0.0)))
    assert batch.targets[0, 1:].tolist() == [False, True, False]
    model = tiny_model()
    logprobs, _ = score(model, batch, 1.0)
    assert logprobs.tolist() == pytest.approx([float(plain_logprobs(model, (10, 11, 12, 13))[1])], abs=1e-6)
    assert batch.behaviour_logprobs.tolist() == pytest.approx([-0.7])


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
@pytest.mark.parametrize("longer", [0, 3, 7])
def test_padding_changes_no_log_probability(kind: str, longer: int) -> None:
    """R-27: a model with absolute positions scores a row the same beside rows 0, 3 or 7 tokens longer, to 1e-5."""
    model = tiny_model(kind)
    row = row_of(ID, (3, 4, 5, 6, 8), (False, False, True, True, True))
    other = row_of(replace(ID, rollout=1), (9,) * (5 + longer), (False,) + (True,) * (4 + longer))
    batch = packed(row, other)
    with torch.no_grad():
        logprobs, _ = score(model, batch, 1.0)
    own = logprobs[batch.row == batch.ids.index(ID)]
    assert own.tolist() == pytest.approx(plain_logprobs(model, row.token_ids)[1:].tolist(), abs=1e-5)


# ---------------------------------------------------------------- whole conversations


class Written(Scripted):
    """Samples the given turns id for id, at log-probabilities -0.01, -0.02, ..., and remembers its prompts."""

    def __init__(self, *turns: tuple[int, ...]) -> None:
        super().__init__(says(), lambda turn: ())
        self.turns = turns
        self.prompts: list[tuple[int, ...]] = []

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.prompts += [request.prompt_ids for request in requests]
        return [self._written(self.turns[turn_of(request)], request) for request in requests]

    def _written(self, ids: tuple[int, ...], request: Request) -> Completion:
        logprobs = tuple(-0.01 * (i + 1) for i in range(len(ids)))
        return Completion(ids, logprobs, 0, "stop" if ids[-1] in request.stop_ids else "length")


ANSWER = "<answer>Merova</answer>"


def call(query: str) -> str:
    return f'<tool_call>\n{{"name": "search", "arguments": {{"query": "{query}"}}}}\n</tool_call>'


def converse(chat: Chat, *turns: str | tuple[int, ...], say: str = "Merova", **limits: Any) -> tuple[Any, Any, Any]:
    """(trajectory, engine, tool) of an agent that samples ``turns`` and reads ``say`` wherever it searches."""
    engine = Written(*(chat.encode_reply(turn) if isinstance(turn, str) else turn for turn in turns))
    tool = Lookup(lambda query, context: say)
    trajectory, _ = run_alone(Agent("a", chat, engine, {"search": tool}, Limits(**limits)))
    return trajectory, engine, tool


def rows(trajectory: Trajectory) -> list[Row]:
    return rows_of(Sample(trajectory, Reward(1.0)))


def test_what_is_trained_is_what_was_sampled_id_for_id() -> None:
    """R-15, R-14: "hel" + "lo" is trained as such, though its text is encoded as "he" + "llo"; each has its logprob."""
    chat = Chat(chatml_tokenizer(), Hermes())
    before, after = call("hello").split("hello")
    apart = (*chat.encode_reply(before)[:-1], *chat.encode("hel"), *chat.encode("lo"), *chat.encode_reply(after))
    assert apart != chat.encode_reply(call("hello")) and chat.decode(apart) == call("hello")
    trajectory, engine, tool = converse(chat, apart, ANSWER)
    assert tool.calls == ["hello"]
    (row,) = rows(trajectory)
    assert row.token_ids == engine.prompts[1] + engine.turns[1], "the second prompt holds the first turn as sampled"
    batch = packed(row)
    assert tuple(batch.input_ids[batch.targets].tolist()) == apart + engine.turns[1]
    ranks = [*range(1, len(apart) + 1), *range(1, len(engine.turns[1]) + 1)]
    assert batch.behaviour_logprobs.tolist() == pytest.approx([-0.01 * rank for rank in ranks])


@pytest.mark.parametrize("ended", [True, False], ids=["stopped", "cut by length"])
def test_what_follows_a_turn_is_what_the_template_puts_there(ended: bool) -> None:
    """R-16, R-18: the newline behind the turn's end, the tool's turn, one generation prompt; the end itself once."""
    tokenizer = chatml_tokenizer()
    chat = Chat(tokenizer, Hermes())
    sampled = chat.encode_reply(call("Tarn"))
    trajectory, engine, _ = converse(chat, sampled if ended else sampled[:-1], ANSWER)
    suffix = "\n<|im_start|>user\n<tool_response>\nMerova\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    text = suffix if ended else "<|im_end|>" + suffix
    assert list(trajectory.turns[1].context_ids) == tokenizer(text, add_special_tokens=False).input_ids
    full = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": TASK.question},
            {"role": "assistant", "content": call("Tarn")},
            {"role": "tool", "content": "Merova"},
        ],
        tools=[chat._schema(Lookup(lambda query, context: ""))],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert list(engine.prompts[1]) == tokenizer(full, add_special_tokens=False).input_ids
    assert sum(rows(trajectory)[0].loss_mask) == len(sampled) - (not ended) + len(engine.turns[1])


def test_either_end_of_a_turn_is_known_and_trained_though_one_is_the_padding() -> None:
    """R-12: the template ends turns with one token, the tokenizer with another, which also pads."""
    tokenizer = chatml_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token
    chat = Chat(tokenizer, Hermes())
    end, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert set(chat.stop_ids) == {end, pad}
    trajectory, engine, tool = converse(chat, (*chat.encode_reply(call("Tarn"))[:-1], pad), ANSWER)
    assert tool.calls == ["Tarn"] and trajectory.valid_format
    batch = packed(*rows(trajectory), pad_id=pad)
    assert batch.input_ids[batch.targets].tolist() == [id for turn in engine.turns for id in turn]
    assert trajectory.turns[1].context_ids[0] == end, "what was not sampled is context"


@pytest.mark.parametrize(("keep", "count"), [(False, 2), (True, 1)])
def test_a_prompt_that_dropped_a_thought_makes_two_rows_and_one_that_kept_it_one(keep: bool, count: int) -> None:
    """R-17: rows follow what was sent; none mixes a context that the model never saw."""
    chat = Chat(chatml_tokenizer(keep_thoughts=keep), Hermes())
    thought = "<think>\nThe capital first.\n</think>\n\n" + call("Tarn")
    trajectory, engine, _ = converse(chat, thought, ANSWER, max_turns=1)  # "answer now" is a user's message
    made = rows(trajectory)
    first, last = (sent + turn for sent, turn in zip(engine.prompts, engine.turns, strict=True))
    assert [row.token_ids for row in made] == [first, last][-count:]
    assert (last[: len(first)] == first) == keep
    assert sum(row.sampled for row in made) == sum(map(len, engine.turns))
    assert sum(row.weight for row in made) == pytest.approx(1.0)


def test_header_and_prefill_are_context() -> None:
    """R-28: the assistant's header and a thought that the template opens are 0 in the mask, sampled ids 1."""
    tokenizer = chatml_tokenizer(prefill="<think>\\n")
    chat = Chat(tokenizer, Hermes())
    header = tuple(tokenizer("<|im_start|>assistant\n<think>\n", add_special_tokens=False).input_ids)
    thought = "Easy.\n</think>\n\n"
    trajectory, engine, _ = converse(chat, thought + call("Tarn"), thought + ANSWER)
    (row,) = rows(trajectory)
    mask: list[bool] = []
    for prompt, turn in zip(engine.prompts, engine.turns, strict=True):
        assert prompt[-len(header) :] == header
        mask += [False] * (len(prompt) - len(mask)) + [True] * len(turn)
    assert list(row.loss_mask) == mask


def test_a_call_that_nobody_waited_for_any_more_is_in_no_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    """R-20: the same messages twice after a timeout, a child only of the second -> one trajectory, the second."""
    monkeypatch.setattr(rollouts, "FIRST_PAUSE_S", 0.01)
    orphan = ("<call> searcher Tarn </call>", "<answer> no </answer>")
    kept = ("<call> searcher Zubora </call>", "<answer> Merova </answer>")
    texts = iter(orphan + kept)

    class Late(Recorder):
        async def generate(self, requests: Sequence[Request]) -> list[Completion]:
            if not self.batches:
                self.batches.append(list(requests))
                await asyncio.sleep(60.0)
            return await super().generate(requests)

    late = Late(says("<answer> Merova </answer>"))
    planner = agent(lambda request: next(texts))
    searcher = Agent("searcher", planner.chat, late)
    team = Team(replace(planner, tools={"searcher": Delegate(searcher)}), max_retries=1)
    (group,) = asyncio.run(run_groups([(0, TASK)], team, 1, lambda task: None, Lockstep(0.1)))
    (rollout,) = group.rollouts
    assert [str(t.id) for t in rollout.trajectories] == ["g0/r0/planner/0", "g0/r0/searcher/0"]
    assert [len(batch) for batch in late.batches] == [1, 1]
    assert tuple(turn.text for turn in rollout.root.turns) == kept
    assert rollout.trajectories[1].task == "Zubora" and len(rows(rollout.trajectories[1])) == 1


class Short(Written):
    """Its second turn comes with 5 ids and what ``logprobs`` says."""

    def __init__(self, first: tuple[int, ...], logprobs: tuple[float, ...]) -> None:
        super().__init__(first, (5, 6, 7, 8, 9))
        self.logprobs = logprobs

    def _written(self, ids: tuple[int, ...], request: Request) -> Completion:
        return Completion(ids, self.logprobs, 0, "stop") if len(ids) == 5 else super()._written(ids, request)


@pytest.mark.parametrize("logprobs", [(-1.0,) * 4, (-1.0,) * 4 + (-9999.0,)], ids=["too few", "no value"])
def test_a_turn_without_all_its_logprobs_leaves_its_trajectory_without_a_row(logprobs: tuple[float, ...]) -> None:
    """R-21: 5 ids and 4 log-probabilities, or a number that stands for none -> an error by type, nothing padded."""
    chat = Chat(chatml_tokenizer(), Hermes())
    engine = Short(chat.encode_reply(call("Tarn")), logprobs)
    trajectory, _ = run_alone(Agent("a", chat, engine, {"search": Lookup(lambda query, context: "")}))
    assert trajectory.failure is not None and trajectory.failure.kind == SamplingEvidenceError.__name__
    id = trajectory.id
    worth = rewards(
        Rollout(id.group, id.rollout, (trajectory,)), {id: Grade(1.0)}, {"a": {"format": 0.1, "correct": 0.9}}
    )
    assert worth[id].value is None and len(trajectory.turns) == 1
    assert align([Sample(trajectory, worth[id])], "none", None, seed=0, step=0) == []


def test_arguments_in_a_json_string_are_an_object_and_bad_ones_a_word_to_the_model() -> None:
    """R-22: the call is made with a dict; after bad JSON the model reads what was wrong, and goes on."""
    chat = Chat(chatml_tokenizer(), Hermes())
    good, bad = (
        '<tool_call>{"name": "search", "arguments": "' + text + '"}</tool_call>'
        for text in (r"{\"query\": \"Tarn\"}", r"{\"query\": ")
    )
    trajectory, engine, tool = converse(chat, good, bad, ANSWER)
    assert trajectory.turns[0].reply.calls[0].arguments == {"query": "Tarn"} and tool.calls == ["Tarn"]
    assert "error: the arguments of search are not valid JSON" in chat.decode(engine.prompts[2])
    assert trajectory.ending == "answer" and not trajectory.valid_format
    (row,) = rows(trajectory)
    assert row.sampled == sum(map(len, engine.turns)), "the mistake is trained on like any other turn"


@pytest.mark.parametrize("side", ["left", "middle"])
def test_a_cut_that_keeps_the_tail_keeps_the_tail(side: Side) -> None:
    """R-24: a page that ends with "Final answer: Paris" still does after truncate_side = "left" or "middle"."""
    chat = Chat(chatml_tokenizer(), Hermes())
    page = "It says a lot, " + "over and over, " * 40 + "Final answer: Paris"
    trajectory, engine, _ = converse(
        chat, call("Tarn"), ANSWER, say=page, max_tokens_per_turn=100, max_tool_response_tokens=40, truncate_side=side
    )
    (result,) = trajectory.turns[0].results
    assert result.text.endswith("Final answer: Paris") and len(chat.encode(result.text)) <= 40
    assert "Final answer: Paris\n</tool_response>" in chat.decode(engine.prompts[1])


@pytest.mark.parametrize("limit", ["max_turns", "max_parallel_tool_calls", "max_calls", "max_depth"])
def test_a_limit_of_zero_lets_no_call_happen(limit: str) -> None:
    """R-25: 0 is none, not unlimited."""
    tool = Lookup(lambda query, context: "Merova")
    own: dict[str, Any] = {limit: 0} if limit in ("max_turns", "max_parallel_tool_calls") else {}
    searcher = agent(says("<call> search Tarn </call>", "<answer> Merova </answer>"), tool, name="searcher")
    planner = agent(says("<call> searcher Tarn </call>", "<answer> a </answer>"), Delegate(searcher), **own)
    trajectory, episode = run_alone(planner, **({} if own else {limit: 0}))
    assert tool.calls == [] and episode.trajectories == [trajectory]
    assert all(result.error for turn in trajectory.turns for result in turn.results)
