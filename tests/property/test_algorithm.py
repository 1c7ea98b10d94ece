"""What alignment, advantages and coefficients must satisfy for any group, whatever its size, weights and rewards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import COMPARED, MEAN_MODES, REWARDS, comparisons, plain_row, rows, samples

from mgrpo.algorithm.advantages import Comparison, Values, advantages
from mgrpo.algorithm.alignment import Mode, align, multiplicities, rows_of
from mgrpo.algorithm.coefficients import token_coefficients
from mgrpo.algorithm.comparison import Roots
from mgrpo.types import Row, Sample, TrajectoryId

SOME = settings(max_examples=40)
MANY = settings(max_examples=100)  # where many options multiply
BOTH = ("sub", "other")
SEVERAL = st.sampled_from([("sub",), BOTH]).flatmap(rows)
WITHIN_QUERY = comparisons(("query", "agent", "agent_turn", "parent"), ("group", "none"))


# ---------------------------------------------------------------- alignment


@MANY
@given(st.integers(0, 12), st.integers(1, 9), st.integers(0, 2**63))
def test_resampling_duplicates_or_drops_to_exactly_d(count: int, d: int, seed: int) -> None:
    times = multiplicities(count, d, "resample", (seed, "sub"))
    assert len(times) == count and math.fsum(times) == (d if count else 0)
    assert all(time.is_integer() for time in times)
    if count <= d:
        assert min(times, default=1) >= 1
    else:
        assert set(times) == {0.0, 1.0}


@SOME
@given(st.integers(0, 12), st.integers(1, 9))
def test_a_weight_is_the_expected_multiplicity(count: int, d: int) -> None:
    assert multiplicities(count, d, "weight", ()) == [d / max(count, 1)] * count
    assert multiplicities(count, d, "none", ()) == [1.0] * count


@SOME
@given(samples(), st.sampled_from(["weight", "resample", "none"]), st.integers(1, 4), st.integers(0, 5))
def test_aligned_rows_are_k_times_d_and_only_what_is_known(made: list[Sample], mode: Mode, d: int, seed: int) -> None:
    aligned = align(made, mode, d, seed=seed, step=1)
    known = {
        s.trajectory.id for s in made if s.reward.value is not None and any(t.token_ids for t in s.trajectory.turns)
    }
    assert {row.id for row in aligned} <= known
    assert mode == "resample" or {row.id for row in aligned} == known
    for group, rollout in {(id.group, id.rollout) for id in known}:
        calls = sum((id.group, id.rollout) == (group, rollout) for id in known)
        own = math.fsum(row.weight for row in aligned if (row.id.group, row.id.rollout) == (group, rollout))
        assert own == pytest.approx(calls if mode == "none" else d)


@SOME
@given(samples(), st.data())
def test_alignment_sees_neither_the_order_of_arrival_nor_other_rollouts(
    made: list[Sample], data: st.DataObject
) -> None:
    shuffled, aligned = data.draw(st.permutations(made)), align(made, "resample", 2, seed=0, step=0)
    assert align(shuffled, "resample", 2, seed=0, step=0) == aligned
    for place in {(s.trajectory.id.group, s.trajectory.id.rollout) for s in made}:
        alone = [s for s in made if (s.trajectory.id.group, s.trajectory.id.rollout) == place]
        own = [row for row in aligned if (row.id.group, row.id.rollout) == place]
        assert align(alone, "resample", 2, seed=0, step=0) == own


@SOME
@given(samples(), st.floats(0.1, 8.0))
def test_rows_keep_every_sampled_token_and_the_whole_weight(made: list[Sample], weight: float) -> None:
    for each in made:
        if each.reward.value is None:
            continue
        cut = rows_of(each, weight)
        sampled = [t for turn in each.trajectory.turns for t in turn.token_ids]
        assert [t for r in cut for t, m in zip(r.token_ids, r.loss_mask, strict=True) if m] == sampled
        assert math.fsum(r.weight for r in cut) == pytest.approx(weight if sampled else 0.0)
        assert all(each.trajectory.turns[r.first_turn : r.first_turn + len(r.turns)] == r.turns for r in cut)


# ---------------------------------------------------------------- who is compared with whom, by the formulas


@dataclass
class Member:
    """Of a comparison group ``group``: ``key`` names it, ``batch`` what "batch" pools it with."""

    group: Hashable
    batch: Hashable
    reward: float
    weight: float = 0.0


def members(made: Sequence[Row], kind: str, roots: Roots) -> tuple[dict[Hashable, Member], list[tuple[Hashable, ...]]]:
    """The members by name, and the names of each row's turns."""
    if kind == "parent":
        known = {key: reward for key, reward in roots.items() if reward is not None}
        own = {key: Member(key[0], "", reward, 1.0) for key, reward in known.items()}
        return own, [((row.id.group, row.id.rollout),) * len(row.turns) for row in made]
    weights: dict[TrajectoryId, float] = defaultdict(float)
    for row in made:
        weights[row.id] += row.weight
    own, names = {}, []
    for row in made:
        turns = [row.first_turn + t if kind == "agent_turn" else 0 for t in range(len(row.turns))]
        names.append(tuple((row.id, turn) for turn in turns))
        for turn, spoken in zip(turns, row.turns, strict=True):
            group = (kind != "batch" and row.id.group, kind != "query" and row.id.agent, turn)
            if spoken.token_ids or kind != "agent_turn":
                own[row.id, turn] = Member(group, kind != "query" and row.id.agent, row.reward, weights[row.id])
    return own, names


def moments(known: Sequence[Member], unbiased: bool) -> tuple[float, float]:
    total = math.fsum(m.weight for m in known)
    mean = math.fsum(m.weight * m.reward for m in known) / total
    freedom = total - math.fsum(m.weight**2 for m in known) / total if unbiased else total
    squares = math.fsum(m.weight * (m.reward - mean) ** 2 for m in known)
    return mean, math.sqrt(squares / freedom) if squares else 0.0


def by_formula(made: Sequence[Row], how: Comparison, roots: Roots) -> Values:
    """The advantages, one member at a time, before whitening."""
    own, names = members(made, how.compare_with, roots)
    values: dict[Hashable, float] = {}
    for name, member in own.items():
        group = [m for m in own.values() if m.group == member.group]
        if len({m.reward for m in group}) == 1:
            continue
        mean, sigma = moments(group, how.std_unbiased)
        if how.leave_one_out:
            mean = moments([m for m in group if m is not member], False)[0]
        if how.scale_rewards == "batch":
            sigma = moments([m for m in own.values() if m.batch == member.batch], how.std_unbiased)[1]
        values[name] = (member.reward - mean) / (1.0 if how.scale_rewards == "none" else sigma)
    return [tuple(values.get(name, 0.0) for name in turns) for turns in names]


def roots_for(made: Sequence[Row], rewards: Sequence[float]) -> Roots:
    """A root for every rollout, and one that has no rows."""
    keys = sorted({(row.id.group, row.id.rollout) for row in made})
    return {key: rewards[i % len(rewards)] for i, key in enumerate([*keys, (0, 99)])}


ROOTS = st.lists(REWARDS, min_size=3, max_size=7)


def assert_close(values: Values | Sequence[tuple[float, ...]], other: Values | Sequence[tuple[float, ...]]) -> None:
    flat, expected = ([v for own in some for v in own] for some in (values, other))
    assert flat == pytest.approx(expected, rel=1e-9, abs=1e-9)


@MANY
@given(SEVERAL, comparisons(), ROOTS)
def test_advantages_are_what_the_formulas_say(made: list[Row], how: Comparison, rewards: list[float]) -> None:
    roots = roots_for(made, rewards)
    plain = replace(how, whiten_advantages=False)
    assert_close(advantages(made, plain, roots).values, by_formula(made, plain, roots))


@SOME
@given(SEVERAL, comparisons(), ROOTS)
def test_whitened_advantages_have_mean_0_and_sample_variance_1_over_tokens(
    made: list[Row], how: Comparison, rewards: list[float]
) -> None:
    roots = roots_for(made, rewards)
    white = advantages(made, replace(how, whiten_advantages=True), roots).values
    plain = by_formula(made, how, roots)
    lengths: dict[TrajectoryId, int] = defaultdict(int)
    for row in made:
        lengths[row.id] += row.sampled
    for agent in BOTH:
        known = [
            Member("", "", value, row.weight * lengths[row.id] / row.sampled)
            for row, own in zip(made, zip(white, plain, strict=True), strict=True)
            if row.id.agent == agent
            for value, was, turn in zip(*own, row.turns, strict=True)
            for _ in turn.token_ids
        ]
        flat = {value for row, own in zip(made, plain, strict=True) if row.id.agent == agent for value in own}
        if known and max(flat) - min(flat) > 1e-9:
            assert moments(known, True) == pytest.approx((0.0, 1.0), abs=1e-9)
        else:
            assert all(member.reward == 0.0 for member in known)


def test_what_differs_by_rounding_alone_is_not_whitened() -> None:
    """Both advantages of "sub" are the same mixture, added up in two orders."""
    others = [(0.0, 0.1), (0.1, 0.2), (0.2, 0.3), (0.3, 0.7)]
    made = []
    for group, order in enumerate((others, others[::-1])):
        made.append(plain_row(TrajectoryId(group, 0, "sub", 0), 1.0))
        made += [plain_row(TrajectoryId(group, k, "other", 0), *known) for k, known in enumerate(order)]
    how = Comparison("query", "none")
    assert len(set(advantages(made, how).values[::5])) == 2
    assert advantages(made, replace(how, whiten_advantages=True)).values[::5] == ((0.0,), (0.0,))


# ---------------------------------------------------------------- what holds for them


@MANY
@given(SEVERAL, comparisons(), ROOTS)
def test_advantages_of_a_group_sum_to_zero(made: list[Row], how: Comparison, rewards: list[float]) -> None:
    """With their weights w; of a leave-one-out baseline with w (W - w), where W is the group's sum of w."""
    roots = roots_for(made, rewards)
    values = advantages(made, replace(how, whiten_advantages=False), roots).values
    own, names = members(made, how.compare_with, roots)
    found = {name: v for turns, row in zip(names, values, strict=True) for name, v in zip(turns, row, strict=True)}
    for group in {member.group for member in own.values()}:
        there = {name: member for name, member in own.items() if member.group == group}
        if not there.keys() <= found.keys():
            continue  # a root without rows
        total = math.fsum(m.weight for m in there.values())
        share = {name: m.weight * (total - m.weight if how.leave_one_out else 1.0) for name, m in there.items()}
        scale = math.fsum(share.values()) * max(1.0, *(abs(found[name]) for name in there))
        assert abs(math.fsum(share[name] * found[name] for name in there)) <= 1e-9 * scale + 1e-12


@SOME
@given(SEVERAL, comparisons(), ROOTS, st.floats(-1000.0, 1000.0), st.floats(0.01, 100.0))
def test_shifted_rewards_give_the_same_advantages_and_scaled_ones_where_normalised(
    made: list[Row], how: Comparison, rewards: list[float], shift: float, scale: float
) -> None:
    def moved(reward: float) -> float:
        return scale * reward + shift

    values = advantages(made, how, roots_for(made, rewards)).values
    other = [replace(row, reward=moved(row.reward)) for row in made]
    there = advantages(other, how, roots_for(made, [moved(reward) for reward in rewards])).values
    factor = scale if how.scale_rewards == "none" and not how.whiten_advantages else 1.0
    assert_close(there, [tuple(factor * v for v in own) for own in values])


@SOME
@given(SEVERAL, WITHIN_QUERY, ROOTS)
def test_no_query_enters_the_advantages_of_another(made: list[Row], how: Comparison, rewards: list[float]) -> None:
    how, roots = replace(how, whiten_advantages=False), roots_for(made, rewards)
    whole = advantages(made, how, roots).values
    for group in {row.id.group for row in made}:
        mine = [i for i, row in enumerate(made) if row.id.group == group]
        own_roots = {key: reward for key, reward in roots.items() if key[0] == group}
        assert advantages([made[i] for i in mine], how, own_roots).values == tuple(whole[i] for i in mine)


@SOME
@given(rows(BOTH), comparisons(("agent", "agent_turn", "batch")))
def test_no_agent_enters_the_advantages_of_another(made: list[Row], how: Comparison) -> None:
    whole = advantages(made, how).values
    for agent in {row.id.agent for row in made}:
        mine = [i for i, row in enumerate(made) if row.id.agent == agent]
        assert advantages([made[i] for i in mine], how).values == tuple(whole[i] for i in mine)


@SOME
@given(SEVERAL, comparisons(), ROOTS, st.data())
def test_permuting_rows_permutes_advantages(
    made: list[Row], how: Comparison, rewards: list[float], data: st.DataObject
) -> None:
    order, roots = data.draw(st.permutations(range(len(made)))), roots_for(made, rewards)
    values = advantages(made, how, roots).values
    assert_close(advantages([made[i] for i in order], how, roots).values, [values[i] for i in order])


@SOME
@given(SEVERAL, comparisons(), st.floats(-1.0, 1.0))
def test_equal_rewards_give_exact_zeros(made: list[Row], how: Comparison, reward: float) -> None:
    result = advantages([replace(row, reward=reward) for row in made], how, roots_for(made, [reward]))
    assert {value for own in result.values for value in own} == {0.0}
    assert result.stats.zero_variance_groups + result.stats.singleton_groups == result.stats.groups


@MANY
@given(
    st.sampled_from([0.0, 1.0, -3.0, 1e6, 1e-150, 1e150]),
    st.sampled_from([1e-300, 1e-150, 1e-16, 1e-12, 1e-5, 1.0, 1e150]),
    comparisons(COMPARED, ("group", "batch")),
    st.sampled_from([1, 2]),
)
def test_near_ties_and_huge_and_tiny_ranges_are_normalised_in_full(
    base: float, gap: float, how: Comparison, turns: int
) -> None:
    """Two rewards are at +-1 (population) or +-sqrt(1/2) (unbiased), however near or far, unless they are equal."""
    rewards = [base, base + gap]
    made = [plain_row(TrajectoryId(0, k, "sub", 0), reward, turns=turns) for k, reward in enumerate(rewards)]
    how = replace(how, whiten_advantages=False)
    size = (2.0 if how.leave_one_out else 1.0) * (math.sqrt(0.5) if how.std_unbiased else 1.0)
    size = size if rewards[0] != rewards[1] else 0.0
    values = advantages(made, how, {(0, k): reward for k, reward in enumerate(rewards)}).values
    assert_close(values, [(-size,) * turns, (size,) * turns])


# ---------------------------------------------------------------- what a token counts


@SOME
@given(samples(), st.sampled_from(["weight", "resample"]), st.integers(1, 4), st.sampled_from(MEAN_MODES))
def test_every_calling_rollout_counts_the_same_whatever_it_called(
    made: list[Sample], mode: Mode, d: int, loss_agg_mode: str
) -> None:
    """By rows, and under "rollout-mean" by tokens; a token mean counts tokens, so long rollouts count more."""
    aligned = align(made, mode, d, seed=0, step=0)
    shares: dict[tuple[int, int], float] = defaultdict(float)
    for row, c in zip(aligned, token_coefficients(aligned, loss_agg_mode), strict=True):
        shares[row.id.group, row.id.rollout] += c * row.sampled
    assert math.fsum(shares.values()) == pytest.approx(1.0 if shares else 0.0)
    if loss_agg_mode != "token-mean":
        assert all(share == pytest.approx(1 / len(shares)) for share in shares.values())
