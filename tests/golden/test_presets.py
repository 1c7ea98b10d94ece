"""Every preset on one question (one_question.py), its advantages and coefficients worked out by hand.

Right or wrong, the planner's rewards are .1 format + .9 correct = 1, .1, .1, 1: mean .55, all .45 away from it, so
sigma is .45 (population) or .45 sqrt(4/3) (unbiased), and the advantages are +-1 or +-sqrt(3/4). Its rollouts have
2, 4, 4, 10 sampled tokens; the searcher's calls 4, 1, 3, 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from one_question import (
    QUESTION,
    Attempt,
    Call,
    alone,
    group_of,
    raw_rewards,
    recipe,
    shaped_rewards,
    stage_of,
    tokens_of,
)
from tiny_rows import row_of

from mgrpo.algorithm.coefficients import token_coefficients
from mgrpo.algorithm.loss import objective_loss, token_loss
from mgrpo.algorithm.packing import pack
from mgrpo.algorithm.shaping import informative
from mgrpo.config import resolve
from mgrpo.config.presets import PRESETS
from mgrpo.gather import root_metrics
from mgrpo.objective import step_plan
from mgrpo.types import TrajectoryId

H = 0.75**0.5
MEANS = [1 / 8, 1 / 16, 1 / 16, 1 / 40]  # 1 / (4 n): the planner's mean over rollouts of token means
CALL_MEANS = [1 / 16, 1 / 4, 1 / 12, 1 / 8]  # the same of the four calls
# Another question, which all four rollouts answer right; the searcher is called once.
EASY = (Attempt(True, (1, 1), (Call(1.0, (1,)),)), *(Attempt(True, (1,)),) * 3)


@dataclass(frozen=True)
class Example:
    """By agent, in order of id: an advantage per trajectory, or per turn of it; and what each of its tokens counts.

    Agents that are not there do not learn.
    """

    advantages: dict[str, list[float | tuple[float, ...]]]
    coefficients: dict[str, list[float]]
    questions: Sequence[Sequence[Attempt]] = (QUESTION,)


# ---------------------------------------------------------------- the examples


def m_grpo() -> Example:
    """b = (.1, .4, .5): the calls are worth .1 + .4 + .3 = .8; 0 (invalid); .1 + .1 = .2; .1 + .4 + .1 = .6. Weights
    d / d_k are 8, 4, 4, 8, in proportion 2, 1, 1, 2. Mean (1.6 + 0 + .2 + 1.2) / 6 = .5, variance
    (2 (.3)^2 + (.5)^2 + (.3)^2 + 2 (.1)^2) / 6 = .09, sigma .3. A token of a call counts w / (6 n)."""
    return Example(
        {"planner": [1, -1, -1, 1], "searcher": [1, -5 / 3, -1, 1 / 3]},
        {"planner": MEANS, "searcher": [2 / 24, 1 / 6, 1 / 18, 2 / 12]},
    )


def main_only() -> Example:
    """m_grpo's planner; the searcher is frozen."""
    return Example({"planner": m_grpo().advantages["planner"]}, {"planner": MEANS})


def sub_only() -> Example:
    """m_grpo's searcher; the planner is frozen."""
    whole = m_grpo()
    return Example({"searcher": whole.advantages["searcher"]}, {"searcher": whole.coefficients["searcher"]})


def single_agent() -> Example:
    """m_grpo's planner, who calls no one."""
    return Example({"planner": [1, -1, -1, 1]}, {"planner": MEANS}, [alone(QUESTION)])


UNALIGNED: list[float | tuple[float, ...]] = [1.2**0.5, -(1.2**0.5), -(0.3**0.5), 0.3**0.5]


def grpo() -> Example:
    """Every call counts once: .8, 0, .2, .6 have mean .4 and off it .4, -.4, -.2, .2; the sum of squares is .4, the
    unbiased variance .4 / 3; .4 / sqrt(.4 / 3) = sqrt(1.2)."""
    return Example({"planner": [H, -H, -H, H], "searcher": UNALIGNED}, {"planner": MEANS, "searcher": CALL_MEANS})


def dr_grpo() -> Example:
    """Only centred: +-.45 and .4, -.4, -.2, .2. A token counts 1 / (4 L), L the most that a trajectory can sample:
    min(160 of context, 10 a turn x (3 turns + the forced one)) = 40."""
    return Example(
        {"planner": [0.45, -0.45, -0.45, 0.45], "searcher": [0.4, -0.4, -0.2, 0.2]},
        {"planner": [1 / 160] * 4, "searcher": [1 / 160] * 4},
    )


def dapo() -> Example:
    """The buffer is a fifth of 10 tokens, so from 8 on a turn is penalised: rollout 3, with 9, by half. The planner's
    rewards 1, .1, .1, .5 have mean .425, off it .575, -.325, -.325, .075, sum of squares .5475. The searcher's are
    grpo's. A token counts 1 / 20 of the planner's, 1 / 10 of the searcher's."""
    sigma = (0.5475 / 3) ** 0.5
    return Example(
        {"planner": [0.575 / sigma, -0.325 / sigma, -0.325 / sigma, 0.075 / sigma], "searcher": UNALIGNED},
        {"planner": [1 / 20] * 4, "searcher": [1 / 10] * 4},
    )


def gspo() -> Example:
    """grpo's advantages and coefficients; what differs is the ratio."""
    return grpo()


def matpo() -> Example:
    """Each call has the advantage of its rollout; all 20 + 10 tokens of the one model count the same."""
    return Example(
        {"planner": [H, -H, -H, H], "searcher": [H, -H, -H, H]},
        {"planner": [1 / 30] * 4, "searcher": [1 / 30] * 4},
    )


def dr_mas() -> Example:
    """With the second question, all rewards of an agent in the step are one group. The planner's six of 1 and two of
    .1 have mean .775 and the sum of squares 6 (.225)^2 + 2 (.675)^2 = 1.215, over 7. The searcher's .1 format + .9
    outcome are 1, 0 (invalid), .1, 1 and 1: mean .62, sum of squares 3 (.38)^2 + (.62)^2 + (.52)^2 = 1.088, over 4."""
    sigma, tau = (1.215 / 7) ** 0.5, (1.088 / 4) ** 0.5
    right, wrong = 0.225 / sigma, -0.675 / sigma
    return Example(
        {
            "planner": [right, wrong, wrong, right, right, right, right, right],
            "searcher": [0.38 / tau, -0.62 / tau, -0.52 / tau, 0.38 / tau, 0.38 / tau],
        },
        {
            "planner": [1 / 16, 1 / 32, 1 / 32, 1 / 80, 1 / 16, 1 / 8, 1 / 8, 1 / 8],
            "searcher": [1 / 20, 1 / 5, 1 / 15, 1 / 10, 1 / 5],
        },
        [QUESTION, EASY],
    )


def at_grpo() -> Example:
    """By turn. Planner: turn 0 has all four, +-sqrt(3/4); turn 1 has 1, .1, 1: mean .7, sum of squares .54, over 2;
    turn 2 one alone. The searcher's rewards, half the outcome and half the expert's, are .8, 0, .1, .6. Turn 0: mean
    .375, sum of squares .4475, over 3. Turn 1 has .8, .1, .6: mean .5, sum of squares .26, over 2."""
    one, two, three = 0.27**0.5, (0.4475 / 3) ** 0.5, 0.13**0.5
    return Example(
        {
            "planner": [(H, 0.3 / one), (-H, -0.6 / one, 0.0), (-H,), (H, 0.3 / one)],
            "searcher": [
                (0.425 / two, 0.3 / three),
                (-0.375 / two,),
                (-0.275 / two, -0.4 / three),
                (0.225 / two, 0.1 / three),
            ],
        },
        {"planner": MEANS, "searcher": CALL_MEANS},
    )


def flow_grpo() -> Example:
    """The outcome alone, 1, 0, 0, 1: mean .5, sigma .5 sqrt(4/3); on every turn. The searcher is frozen."""
    return Example({"planner": [H, -H, -H, H]}, {"planner": MEANS})


WORKED: tuple[Callable[[], Example], ...] = (
    m_grpo,
    main_only,
    sub_only,
    single_agent,
    grpo,
    dr_grpo,
    dapo,
    gspo,
    matpo,
    dr_mas,
    at_grpo,
    flow_grpo,
)
EXAMPLES = {example.__name__: example for example in WORKED}


def test_every_preset_has_an_example() -> None:
    assert EXAMPLES.keys() == PRESETS.keys(), "work out by hand what the preset does on the question, and add it here"


@pytest.mark.parametrize("name", PRESETS)
def test_tokens_count_what_was_worked_out_by_hand(name: str) -> None:
    """Advantage and coefficient of every sampled token that the update sees."""
    example = EXAMPLES[name]()
    found = tokens_of(resolve(recipe(name)), *example.questions)
    assert {id.agent for id in found} == set(example.advantages) == set(example.coefficients)
    for agent in example.advantages:
        ids = sorted(id for id in found if id.agent == agent)
        for id, worth, coefficient in zip(ids, example.advantages[agent], example.coefficients[agent], strict=True):
            turns = turns_of(example.questions[id.group], id)
            of_turns = worth if isinstance(worth, tuple) else (worth,) * len(turns)
            expected = [value for value, length in zip(of_turns, turns, strict=True) for _ in range(length)]
            assert [token.advantage for token in found[id]] == pytest.approx(expected, abs=1e-6), id
            assert [token.coefficient for token in found[id]] == pytest.approx([coefficient] * sum(turns), abs=1e-6), id


def turns_of(attempts: Sequence[Attempt], id: TrajectoryId) -> tuple[int, ...]:
    attempt = attempts[id.rollout]
    return attempt.turns if id.agent == "planner" else attempt.calls[id.invocation].turns


# ---------------------------------------------------------------- what a preset changes beside them


def objective(name: str, agent: str = "planner") -> Any:
    config = resolve(recipe(name))
    return step_plan(config, config.owner(agent), stage_of(config), pad_id=0).objective


def clipped(name: str, log_ratios: Sequence[float], advantage: float) -> list[float]:
    """The loss of each token of one sequence."""
    logprobs = torch.tensor(log_ratios, dtype=torch.float64)
    nothing = torch.zeros_like(logprobs)
    return token_loss(logprobs, nothing, nothing + advantage, nothing.long(), objective(name)).tolist()


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"gspo", "dapo"}))
def test_clipping_is_symmetric_at_a_fifth_for_each_token(name: str) -> None:
    """Ratios 1.5 and 1 with A = 2: -min(3, 2.4) and -2; 1.5 and .5 with A = -1: 1.5 and .8."""
    assert clipped(name, [math.log(1.5), 0.0], 2.0) == pytest.approx([-2.4, -2.0], abs=1e-6)
    assert clipped(name, [math.log(1.5), math.log(0.5)], -1.0) == pytest.approx([1.5, 0.8], abs=1e-6)


def test_dapo_clips_higher_above() -> None:
    """Ratio 1.5 with A = 1: -1.28, not -1.2; ratio .5 with A = -1: .8."""
    assert clipped("dapo", [math.log(1.5)], 1.0) == pytest.approx([-1.28], abs=1e-6)
    assert clipped("dapo", [math.log(0.5)], -1.0) == pytest.approx([0.8], abs=1e-6)


def test_gspo_clips_the_whole_sequence_within_a_few_parts_in_ten_thousand() -> None:
    """Log-ratios .5 and -.498 have mean .001, so r = 1.0010005 of both tokens: with A = 1 -1.0004, with A = -1
    1.0010005. Mean -.001: r = .9990005, with A = -1 .9997; mean .0002 lies inside."""
    assert clipped("gspo", [0.5, -0.498], 1.0) == pytest.approx([-1.0004] * 2, abs=1e-9)
    assert clipped("gspo", [0.5, -0.498], -1.0) == pytest.approx([math.exp(0.001)] * 2, abs=1e-9)
    assert clipped("gspo", [0.498, -0.5], -1.0) == pytest.approx([0.9997] * 2, abs=1e-9)
    assert clipped("gspo", [0.5, -0.4996], 1.0) == pytest.approx([-math.exp(0.0002)] * 2, abs=1e-9)


KL = {"grpo": 0.04, "flow_grpo": 0.001}


@pytest.mark.parametrize("name", PRESETS)
def test_only_grpo_and_flow_grpo_hold_the_policy_to_its_reference(name: str) -> None:
    """A token with log pi .1 above the reference: k3 = exp(-.1) - 1 + .1 = .00483742, times .04 or .001."""
    rows = [row_of(TrajectoryId(0, 0, "planner", 0), (1, 2), (False, True))]
    (batch,) = pack(rows, [(0.0,)], token_coefficients(rows), 9, pad_id=0)
    batch = replace(batch, ref_logprobs=torch.tensor([-1.1]))
    loss, _ = objective_loss(torch.tensor([-1.0]), torch.tensor([2.0]), batch, objective(name))
    assert float(loss) == pytest.approx(KL.get(name, 0.0) * 0.00483742, abs=1e-9)


def test_dapo_penalises_turns_that_come_near_the_limit() -> None:
    """Of 10 tokens the last 2 are the buffer: 9 are half way, so 1.0 - .5; nobody else's turn has more than 4."""
    config = resolve(recipe("dapo"))
    assert [agent.overlong_buffer_len for agent in config.agents.values()] == [2, 2]
    raw, final = (rewards(config, *group_of(QUESTION)) for rewards in (raw_rewards, shaped_rewards))
    long = TrajectoryId(0, 3, "planner", 0)
    assert (raw[long].value, final[long].value, final[long].parts["overlong"]) == (1.0, 0.5, -0.5)
    assert {id for id in raw if raw[id].value != final[id].value} == {long}


def test_dapo_replaces_questions_that_are_all_right_or_all_wrong() -> None:
    """By what is correct, before shaping: a long turn of a right answer makes no group informative."""
    config = resolve(recipe("dapo"))
    assert config.filter_groups.enable
    all_right = tuple(Attempt(True, attempt.turns) for attempt in QUESTION)
    all_wrong = tuple(Attempt(False, attempt.turns) for attempt in QUESTION)
    taught = []
    for attempts in (QUESTION, all_right, all_wrong):
        group, grades = group_of(attempts)
        worths = shaped_rewards(config, group, grades)
        assert len({worths[rollout.root.id].value for rollout in group.rollouts}) > 1
        metric = config.filter_groups.metric
        taught.append(informative(root_metrics(group, raw_rewards(config, group, grades), metric)))
    assert taught == [True, False, False]


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"dapo"}))
def test_no_other_preset_replaces_questions_or_shapes_rewards(name: str) -> None:
    config = resolve(recipe(name))
    attempts = alone(QUESTION) if name == "single_agent" else QUESTION
    assert not config.filter_groups.enable
    assert raw_rewards(config, *group_of(attempts)) == shaped_rewards(config, *group_of(attempts))
