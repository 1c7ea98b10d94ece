"""What is said of a recipe's rewards, comparisons and losses, checked against the code that does them."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from report_samples import config_of, meaning, team
from rich.console import Console

from mgrpo.config import load
from mgrpo.report.plan import header, model_sizes, plan_text
from mgrpo.report.words import comparison_lines, loss_lines, reward_lines

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.toml"


def test_rewards_with_the_recipe_s_numbers() -> None:
    lines = reward_lines(team({"reward_weights": {"format": 0.2, "correct_main": 0.3, "expert": 0.5}}))
    assert meaning(lines, "R(planner)").startswith("0.1 format + 0.9 correct if")
    assert meaning(lines, "R(searcher)").startswith("0.2 format + 0.3 correct_main + 0.5 expert if")
    outcome = reward_lines(team({"reward_weights": {"format": 0.1, "correct_main": 0.9, "expert": 0.0}}))
    assert meaning(outcome, "R(searcher)").startswith("0.1 format + 0.9 correct_main if")
    assert "expert: the sub-answer's grade (gold)" in meaning(lines, "terms")
    excluding = reward_lines(config_of(rollout={"unknown_reward": "exclude"}))
    assert "it excludes the trajectory" in meaning(excluding, "terms")
    assert "my.module:f(rollout, grades, weights, unknown)" in reward_lines(config_of(reward="my.module:f"))[0][1]


def test_comparisons_in_words() -> None:
    lines = comparison_lines(team())
    assert "its 8 attempts at one question" in meaning(lines, "planner")
    assert "A = (R - mu) / sigma" in meaning(lines, "planner")
    assert "d_k calls counts 8/d_k" in meaning(lines, "searcher")
    assert "to 8 per attempt" in meaning(comparison_lines(team({"align": "resample"})), "searcher")
    assert "every call counts 1" in meaning(comparison_lines(team({"align": "none"})), "searcher")
    assert meaning(comparison_lines(team({"trainable": False})), "searcher") == "nobody; it is frozen."


@pytest.mark.parametrize(
    ("options", "planner", "searcher", "never"),
    [
        (
            {},
            "its 8 attempts at one question, with each other. A = (R - mu) / sigma: mean mu, population standard"
            " deviation sigma (equation 10).",
            "A = (R - mu) / sigma: weighted mean mu, weighted population standard deviation sigma (equation 13).",
            "across questions, and never across agents. Equal R, or a group of one, gives A = 0; there is no epsilon.",
        ),
        (
            {"scale_rewards": "none"},
            "A = R - mu: mean mu (equation 10 without sigma).",
            "A = R - mu: weighted mean mu (equation 13 without sigma).",
            "across questions, and never across agents.",
        ),
        (
            {"scale_rewards": "batch", "std_unbiased": True},
            "A = (R - mu) / sigma: mean mu, unbiased standard deviation sigma of all its R in the step.",
            "weighted unbiased standard deviation sigma of all its R in the step.",
            "across questions, but for the scale of A, and never across agents.",
        ),
        (
            {"scale_rewards": "none", "leave_one_out": True},
            "A = R - mu: mean mu of the others.",
            "A = R - mu: weighted mean mu of the others.",
            "across questions, and never across agents.",
        ),
        (
            {"scale_rewards": "none", "whiten_advantages": True},
            "A = R - mu: mean mu. Then A gets mean 0 and standard deviation 1 over all its sampled tokens of the step.",
            "weighted mean mu. Then A gets mean 0",
            "across questions, but for the scale of A, and never across agents. Equal R, or a group of one, gives"
            " A = 0 before A is whitened",
        ),
        (
            {"compare_with": "agent_turn"},
            "each turn with the same turn of its 8 attempts at one question. A",
            "each turn with the same turn of all its calls in the 8 attempts at one question; a call of an attempt",
            "across questions, and never across agents.",
        ),
        (
            {"compare_with": "batch"},
            "all its attempts in the step, over all questions. A = (R - mu) / sigma",
            "all its calls in the step, over all questions; a call of",
            "across agents.",
        ),
        (
            {"compare_with": "query"},
            "its 8 attempts at one question, with each other. A",
            "all its calls in the 8 attempts at one question, with each other; a call",
            "across questions, and never across agents.",
        ),
    ],
)
def test_every_option_of_the_comparison_in_words(
    options: dict[str, Any], planner: str, searcher: str, never: str
) -> None:
    lines = comparison_lines(team(learner=options))
    assert planner in meaning(lines, "planner")
    assert searcher in meaning(lines, "searcher")
    assert meaning(lines, "never").startswith(never)


def test_a_sub_agent_that_inherits_says_from_whom() -> None:
    lines = comparison_lines(team({"learner": {"compare_with": "parent"}}))
    assert meaning(lines, "searcher") == (
        "nobody itself: it inherits the A of its attempt's planner, whose R is compared over the 8 attempts at one"
        " question. A = (R - mu) / sigma: mean mu, population standard deviation sigma."
    )
    assert "each other" in meaning(lines, "planner")


def test_agents_that_share_weights_say_so() -> None:
    shared = {"model": None, "share_weights_with": "planner"}
    pooled = team(shared, learner={"compare_with": "query"})
    whom = "all trajectories of planner and searcher in the 8 attempts at one question, pooled"
    assert whom in meaning(comparison_lines(pooled), "planner") and whom in meaning(
        comparison_lines(pooled), "searcher"
    )
    assert meaning(comparison_lines(pooled), "never").startswith("across questions. Equal R")
    one = loss_lines(team(shared, learner={"loss_denominator": "weights"}))
    added = "the losses of planner and searcher are added, since they share weights"
    for name in ("planner", "searcher"):
        assert "W = sum of w over planner and searcher" in meaning(one, f"{name} in rl")
        assert f"{added}; sums and denominators are over the rows of all of them" in meaning(one, f"{name} in rl")
        own = meaning(loss_lines(team(shared)), f"{name} in rl")
        assert own.count(added) == 1 and "rows of all" not in own
    text = plan_text(team(shared))
    assert "planner's" in text and len(model_sizes(team(shared))) == 1
    frozen = comparison_lines(team(shared | {"trainable": False}))
    assert meaning(frozen, "searcher") == "nobody; its weights are planner's, and its own rows are not learned from."


def test_what_shapes_and_filters_rewards_in_words() -> None:
    searcher = {"max_tokens_per_turn": 100, "overlong_buffer_len": 20, "overlong_penalty_factor": 0.5}
    config = team(searcher | {"mask_truncated": True}, filter_groups={"enable": True, "metric": "correct"})
    lines = reward_lines(config)
    ramp = "added to R: 0 while its longest turn has up to 80 tokens, then down to -0.5 at 100"
    assert meaning(lines, "overlong(searcher)") == ramp
    assert "cut off leaves statistics and loss" in meaning(lines, "masked(searcher)")
    assert not {"overlong(planner)", "masked(planner)"} & {term for term, _ in lines}
    out = meaning(comparison_lines(config), "left out")
    assert "all have the same correct, before shaping, are replaced by others; at most 10 times" in out
    penalised = meaning(reward_lines(team(learner={"kl_coef": 0.01, "kl_in": "reward"})), "KL(searcher)")
    assert "R loses 0.01 times the sum over its sampled tokens of k3 = pi_ref / pi - 1 + log(pi / pi_ref)" in penalised


def test_the_ramp_that_is_told_is_the_one_that_is_applied() -> None:
    from mgrpo.algorithm.shaping import overlong_penalty

    assert overlong_penalty(80, 100, 20, 0.5) == 0.0 > overlong_penalty(81, 100, 20, 0.5)
    assert overlong_penalty(100, 100, 20, 0.5) == -0.5


def test_losses_and_their_denominators() -> None:
    lines = loss_lines(team({"trajectories_per_rollout": 4}, learner={"clip_ratio_high": 0.28}))
    planner, searcher = meaning(lines, "planner in rl"), meaning(lines, "searcher in rl")
    assert "loss = - sum of c min(r A, clip(r, 0.8, 1.28) A)" in planner and "w = 1, W = 128 (attempts)" in planner
    assert "w = 4/d_k" in searcher and "128 x 4 = 512, less 4 for each attempt without a call" in searcher
    assert "loss = - sum of c log pi" in meaning(lines, "planner in warmup")
    assert "w = 1, W = number of its calls" in meaning(lines, "searcher in warmup")
    assert "w = times drawn" in meaning(loss_lines(team({"align": "resample"})), "searcher in rl")


@pytest.mark.parametrize(
    ("mode", "formula"),
    [
        ("seq-mean-token-mean", "c = w / (n W), w = 8/d_k, W = 128 x 8"),
        ("seq-mean-token-sum", "c = w / W, w = 8/d_k, W = 128 x 8"),
        ("seq-mean-token-sum-norm", "c = w / (L W), w = 8/d_k, L = 4608, the most it can sample, W = 128 x 8"),
        ("token-mean", "c = w / N, w = 8/d_k, N = sum of w n"),
        ("rollout-mean", "c = w / (N M), w = 8/d_k, N = sum of w n in its attempt, M = number of attempts with rows"),
    ],
)
def test_every_aggregation_mode_in_words(mode: str, formula: str) -> None:
    lines = loss_lines(team(learner={"loss_agg_mode": mode}))
    assert f"{mode}: {formula}" in meaning(lines, "searcher in rl")


@pytest.mark.parametrize(
    ("options", "sentences"),
    [
        ({"policy_loss": "cispo"}, ["- sum of c sg(clip(r, 0.8, 1.2)) A log pi", "sg: no gradient."]),
        ({"policy_loss": "reinforce"}, ["- sum of c A log pi"]),
        ({"clip_ratio_c": 3.0}, ["- sum of c max(min(r A, clip(r, 0.8, 1.2) A), 3 A if A < 0)"]),
        (
            {"importance_sampling_level": "sequence"},
            ["r = geometric mean of pi / pi_old over its row's sampled tokens"],
        ),
        (
            {"kl_coef": 0.04, "kl_estimator": "k1"},
            ["- sum of c [min(r A, clip(r, 0.8, 1.2) A) - 0.04 k1]", "k1 = log(pi / pi_ref); pi_ref: the same weights"],
        ),
        ({"kl_coef": 0.04, "kl_estimator": "k2"}, ["- 0.04 k2]", "k2 = log(pi / pi_ref)^2 / 2"]),
        ({"kl_coef": 0.04}, ["- 0.04 k3]", "k3 = pi_ref / pi - 1 + log(pi / pi_ref)"]),
        ({"kl_coef": 0.04, "kl_in": "reward"}, ["- sum of c min(r A, clip(r, 0.8, 1.2) A)"]),
        ({"entropy_coef": 0.01}, ["clip(r, 0.8, 1.2) A) + 0.01 H]", "H = entropy of pi at the token, in nats"]),
        (
            {"rollout_is": "token"},
            [
                "- sum of c [v min(r A, clip(r, 0.8, 1.2) A)]",
                "v = min(pi_old / pi_sampled, 2) per token; pi_old: pi before the step's first update",
                "Unless told above, r = pi / pi_old per token; pi_old sampled it.",
            ],
        ),
        (
            {"rollout_is": "sequence", "rollout_is_threshold": 5.0},
            ["v = min(pi_old / pi_sampled, 5) of the products over its row's sampled tokens"],
        ),
        (
            {"rollout_rs": "token"},
            ["tokens whose pi / pi_sampled before the update is outside [0.5, 5] are in no sum, n or W"],
        ),
        (
            {"rollout_rs": "sequence", "rollout_rs_threshold": [0.9, 1.1]},
            ["rows whose product of pi / pi_sampled before the update is outside [0.9, 1.1] are in no sum"],
        ),
        (
            {"num_minibatches": 2, "num_iterations": 3},
            ["6 updates a step (2 minibatches of whole questions, 3 times)", "W = 64 (attempts)"],
        ),
    ],
)
def test_every_option_of_the_loss_in_words(options: dict[str, Any], sentences: list[str]) -> None:
    lines = loss_lines(team(learner=options))
    told = meaning(lines, "planner in rl") + meaning(lines, "searcher in rl")  # the legend ends the last one
    for sentence in sentences:
        assert sentence in told
    taught = [text for term, text in lines if term.endswith("in warmup")]
    assert taught == ["loss = - sum of c log pi"] * 2  # demonstrations have none of these


def test_pi_is_told_to_be_at_the_sampling_temperature() -> None:
    lines = loss_lines(team({"temperature": 0.7}))
    assert "pi is at the sampling temperature 0.7 (searcher)." in meaning(lines, "searcher in rl")
    assert "temperature" not in str(loss_lines(team()))


def test_the_length_that_is_told_is_the_one_that_divides() -> None:
    pytest.importorskip("torch")
    from mgrpo.objective import step_plan

    config = team({"max_turns": 3, "max_tokens_per_turn": 50}, learner={"loss_agg_mode": "seq-mean-token-sum-norm"})
    assert step_plan(config, "searcher", config.stages[-1], 0).scale_factors == {"searcher": 200}
    assert "L = 200, the most it can sample" in meaning(loss_lines(config), "searcher in rl")
    fixed = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 64}
    assert "L = 64, W" in meaning(loss_lines(team(learner=fixed)), "searcher in rl")


def test_the_header_of_the_quickstart_is_short_and_complete() -> None:
    console = Console(file=StringIO(), width=120)
    console.print(header(load(QUICKSTART)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert len(text.splitlines()) <= 25
    for words in ("preset m_grpo", "hard 36", "counts", "(equation 13)", "clip(r, 0.8, 1.2) A)", "128 x 8 = 1024"):
        assert words in text


def test_stages_with_one_formula_share_its_lines() -> None:
    shape = {"groups_per_step": 4, "steps": 1}
    config = team(stages=[{"name": "one", **shape}, {"name": "two", **shape}, {"name": "three", **shape, "steps": 9}])
    assert [term for term, _ in loss_lines(config) if term] == [
        "planner in one, two, three",
        "searcher in one, two, three",
    ]


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum", "token-mean", "rollout-mean"])
def test_denominators_are_those_of_the_algorithm(mode: Any) -> None:
    """A token's coefficient, worked out from the formula and the numbers that are told, is the algorithm's."""
    from report_samples import group_of, rewarded, rollout

    from mgrpo.algorithm.alignment import align
    from mgrpo.algorithm.coefficients import token_coefficients
    from mgrpo.types import Sample

    stages = [{"name": "rl", "steps": 1, "groups_per_step": 1, "num_generations": 3}]
    config = team(stages=stages, learner={"loss_agg_mode": mode})
    group = group_of(*(rollout(index, index + 1) for index in range(3)))
    worth = rewarded(group)
    searchers = [Sample(t, worth[t.id]) for member in group.rollouts for t in member.trajectories[1:]]
    rows = align(searchers, "weight", 8, seed=0, step=0)
    w, n = rows[0].weight, rows[0].sampled
    told = meaning(loss_lines(config), "searcher in rl")
    formula = re.search(r"c = (.*?), w = 8/d_k", told)
    assert formula is not None and w == 8 / 1 and ("3 x 8 = 24" in told) == ("W" in formula[1])
    numbers = {"w": w, "n": n, "W": 24.0, "N": 24 * n if mode == "token-mean" else w * n, "M": 3}
    expected = eval(re.sub(r"(?<=\w) (?=\w)", " * ", formula[1]), numbers)
    assert token_coefficients(rows, mode)[0] == pytest.approx(expected)
