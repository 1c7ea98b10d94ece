"""Cases of other trainers' trackers about masks, tokens and templates, with their right values.

Those that need a conversation stand beside what they are about: R-15 to R-18 and R-24 in test_chat.py, R-20 in
test_rollout.py, R-21, R-25 and R-28 in test_loop.py, R-22 in test_formats.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import plain_logprobs, tiny_model
from tiny_rows import row_of
from tiny_tokenizer import chatml_tokenizer

from mgrpo.agents.chat import Chat
from mgrpo.agents.formats import Hermes
from mgrpo.algorithm.alignment import rows_of
from mgrpo.algorithm.loss import Objective, objective_loss
from mgrpo.algorithm.packing import Batch, pack
from mgrpo.engines.base import Request, Sampling
from mgrpo.engines.decode import Decoder
from mgrpo.policy.step import penalised
from mgrpo.policy.update import score
from mgrpo.types import Message, Reply, Reward, Row, Sample, Trajectory, TrajectoryId, Turn

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


def test_a_prompt_that_dropped_a_thought_makes_two_rows_and_one_that_kept_it_one() -> None:
    """R-17: rows follow what was sent; none mixes a context that the model never saw."""
    thought = "<think>\nThe capital first.\n</think>\n\nMerova"
    for keep, count in ((False, 2), (True, 1)):
        chat = Chat(chatml_tokenizer(keep_thoughts=keep), Hermes())
        first = chat.prompt_ids([Message("user", "What is it?")])
        turn = chat.encode_reply(thought)
        messages = [Message("user", "What is it?"), Message("assistant", thought, ids=turn), Message("user", "Sure?")]
        second, sent = chat.prompt_ids(messages), first + turn
        rewritten = second[: len(sent)] != sent
        context = second if rewritten else second[len(sent) :]
        answer = chat.encode_reply("Yes")
        turns = (
            Turn(first, turn, (-1.0,) * len(turn), 0, "stop", "", Reply()),
            Turn(context, answer, (-1.0,) * len(answer), 0, "stop", "", Reply(), new_row=rewritten),
        )
        rows = rows_of(Sample(Trajectory(ID, "t", turns, "answer"), Reward(1.0)))
        assert len(rows) == count
        assert rows[-1].token_ids == second + answer, "trained in the context that was sent, token for token"
        assert sum(row.sampled for row in rows) == len(turn) + len(answer)


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
