"""A step that two processes share, each with every other micro-batch and gradients summed over gloo, is the step of one
process: every optimiser step's gradient and the weights that come of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
from hypothesis import given, settings
from strategies import Case, Recorder, cases, distance, stepped
from torch import Tensor

DEADLINE = 60  # seconds, for whatever the two wait for
EXACT = 1e-10


def worker(rank: int, meeting_point: str, pipe: Connection) -> None:
    """Takes its share of every case that comes through ``pipe``, until None comes."""
    torch.set_num_threads(1)
    store, deadline = f"file://{meeting_point}", timedelta(seconds=DEADLINE)
    torch.distributed.init_process_group("gloo", store, deadline, rank=rank, world_size=2)
    pipe.send("ready")
    while (case := pipe.recv()) is not None:
        policy = stepped(case, policy=Recorder(case, (rank, 2), exchange=torch.distributed.all_reduce))
        pipe.send(([gradient.numpy() for gradient in policy.gradients], weights(policy).numpy()))
    torch.distributed.destroy_process_group()


def weights(policy: Recorder) -> Tensor:
    return torch.nn.utils.parameters_to_vector(policy.model.parameters()).detach()


def answer(pipe: Connection) -> object:
    assert pipe.poll(DEADLINE), f"no answer of a worker within {DEADLINE} s"
    return pipe.recv()


@pytest.fixture(scope="module")
def pipes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Connection]]:
    """The ends of two workers' pipes."""
    meeting_point = str(tmp_path_factory.mktemp("gloo") / "store")
    spawn, started, ends = multiprocessing.get_context("spawn"), [], []
    for rank in range(2):
        here, there = spawn.Pipe()
        process = spawn.Process(target=worker, args=(rank, meeting_point, there), daemon=True)
        process.start()
        there.close()
        started.append(process)
        ends.append(here)
    try:
        assert [answer(end) for end in ends] == ["ready", "ready"]
        yield ends
        for end in ends:
            end.send(None)
        for process in started:
            process.join(DEADLINE)
        assert [process.exitcode for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()


@settings(max_examples=12)
@given(case=cases(rates=(0.1,)))
def test_a_step_of_two_processes_is_that_of_one(pipes: list[Connection], case: Case) -> None:
    for pipe in pipes:
        pipe.send(case)
    alone = stepped(case)
    for pipe in pipes:
        gradients, moved = answer(pipe)
        assert distance(alone.gradients, [torch.from_numpy(gradient) for gradient in gradients]) <= EXACT
        assert distance([weights(alone)], [torch.from_numpy(moved)]) <= EXACT
