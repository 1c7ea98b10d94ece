"""Rows to padded tensors within a token budget."""

from __future__ import annotations

import pytest
import torch
from tiny_rows import per_turn, row_of

from mgrpo.algorithm.packing import pack
from mgrpo.types import Reply, Row, TrajectoryId, Turn

PAD = 99


def row(length, rollout=0, *, segment=0, sampled=1):
    """Token i of rollout r is 10 r + i; the last ``sampled`` tokens were sampled with log-probability -token/100."""
    tokens = tuple(10 * rollout + i for i in range(length))
    mask = (False,) * (length - sampled) + (True,) * sampled
    logprobs = tuple(-t / 100 if m else 0.0 for t, m in zip(tokens, mask, strict=True))
    return row_of(TrajectoryId(0, rollout, "searcher", 0), tokens, mask, logprobs, segment=segment)


def packed(rows, budget=1000, **options):
    numbers = [float(i + 1) for i in range(len(rows))]
    return pack(rows, per_turn(rows, numbers), [n / 10 for n in numbers], budget, PAD, **options)


def test_one_batch_right_padded():
    (batch,) = packed([row(2, 1), row(4, 2, sampled=2)])
    assert [id.rollout for id in batch.ids] == [2, 1]
    assert batch.input_ids.tolist() == [[20, 21, 22, 23], [10, 11, PAD, PAD]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.targets.tolist() == [[False, False, True, True], [False, True, False, False]]
    assert batch.indices == (1, 0)
    assert batch.row.tolist() == [0, 0, 1]
    assert batch.advantages.tolist() == [2, 2, 1]
    torch.testing.assert_close(batch.coefficients, torch.tensor([0.2, 0.2, 0.1]))
    torch.testing.assert_close(batch.behaviour_logprobs, torch.tensor([-0.22, -0.23, -0.11]))
    assert (batch.input_ids.dtype, batch.targets.dtype) == (torch.int64, torch.bool)


def test_a_log_probability_belongs_to_its_own_token():
    """verl #3287: tokens 10..13, the third sampled; over predictions the mask is [0, 1, 0] and scores token 12."""
    source = row_of(TrajectoryId(0, 0, "a", 0), (10, 11, 12, 13), (False, False, True, False), (0, 0, -0.7, 0))
    (batch,) = packed([source])
    predictions = batch.targets[:, 1:]
    assert predictions.tolist() == [[False, True, False]]
    assert batch.input_ids[:, 1:][predictions].tolist() == [12]
    assert batch.behaviour_logprobs.tolist() == pytest.approx([-0.7])


def test_padding_is_found_by_position_not_by_token():
    """verl #1381: a sampled end token equal to the pad token is trained, padding is not."""
    source = row_of(TrajectoryId(0, 0, "a", 0), (4, 5, 6, PAD), (False, True, True, True))
    (batch,) = packed([source, row(6, 1)])
    assert batch.input_ids[1].tolist() == [4, 5, 6, PAD, PAD, PAD]
    assert batch.targets[1].tolist() == [False, True, True, True, False, False]
    assert batch.attention_mask[1].tolist() == [1, 1, 1, 1, 0, 0]


def test_budget_counts_padding_and_every_row_is_there_once():
    rows = [row(length, k) for k, length in enumerate([3, 8, 5, 5, 2, 7, 9])]
    batches = packed(rows, budget=16)
    assert all(batch.input_ids.numel() <= 16 for batch in batches)
    assert sorted(id.rollout for batch in batches for id in batch.ids) == list(range(7))
    assert [len(batch.ids) for batch in batches] == [1, 2, 3, 1]


def test_a_row_over_the_budget_stands_alone():
    assert [batch.input_ids.shape for batch in packed([row(9), row(2, 1)], budget=4)] == [(1, 9), (1, 2)]


def test_order_is_a_function_of_length_and_id():
    rows = [row(3, 2), row(3, 0, segment=1), row(3, 0), row(3, 1)]
    ids = [batch.ids for batch in packed(rows, budget=6)]
    assert ids == [batch.ids for batch in packed(rows[::-1], budget=6)]
    assert [id.rollout for part in ids for id in part] == [0, 0, 1, 2]


def test_rows_that_teach_nothing_can_be_dropped():
    rows = [row(3, k) for k in range(4)]
    (batch,) = pack(rows, per_turn(rows, [0.0, 1.0, -1.0, 2.0]), [0.5, 0.5, 0.5, 0.0], 100, PAD, drop_zero=True)
    assert [id.rollout for id in batch.ids] == [1, 2]
    assert pack(rows[:1], [(0.0,)], [0.5], 100, PAD, drop_zero=True) == []
    assert len(pack(rows, [(0.0,)] * 4, [0.5] * 4, 100, PAD)[0].ids) == 4


def test_moving_a_batch_keeps_every_field():
    (batch,) = packed([row(3), row(4, 1)])
    moved = batch.to("cpu")
    assert moved.ids == batch.ids
    for name in (
        "input_ids",
        "attention_mask",
        "position_ids",
        "targets",
        "advantages",
        "coefficients",
        "row",
        "behaviour_logprobs",
    ):
        assert torch.equal(getattr(moved, name), getattr(batch, name)), name


def test_rejected_targets_leave_everything_that_speaks_of_targets():
    (batch,) = packed([row(2, 1), row(4, 2, sampled=2)])
    left = batch.keeping(torch.tensor([True, False, True]))
    assert left.targets.tolist() == [[False, False, True, False], [False, True, False, False]]
    assert (left.row.tolist(), left.advantages.tolist()) == ([0, 1], [2, 1])
    assert left.weighed([0.5, 0.25]).coefficients.tolist() == [0.25, 0.5], "by where the row stood when it was packed"


def test_wrong_lengths_are_named():
    with pytest.raises(ValueError, match="2 rows, 1 advantages, 2 coefficients"):
        pack([row(2), row(2, 1)], [(1.0,)], [1.0, 1.0], 10, PAD)
    with pytest.raises(ValueError, match="g0/r0/searcher/0 segment 0: 2 advantages for 1 turns"):
        pack([row(2)], [(1.0, 1.0)], [1.0], 10, PAD)
    short = Row(TrajectoryId(3, 1, "a", 0), 0, (Turn((1,), (2, 3), (-0.1,), 0, "stop", "", Reply()),), 1.0)
    with pytest.raises(ValueError, match="g3/r1/a/0 segment 0: a turn has 2 tokens, 1 log-probabilities"):
        packed([short])


def test_a_first_token_cannot_be_predicted():
    with pytest.raises(ValueError, match="g0/r0/searcher/0 segment 0: its first token was sampled"):
        packed([row(2, sampled=2)])
