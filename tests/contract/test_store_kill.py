"""Kill -9 at any moment: groups are whole or absent, weights and consumption agree, nothing is trained twice or lost.

Run as a script this file is the victim: it collects and learns in one process for ever, from where it finds itself,
in the store that MGRPO_STORE names.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mgrpo
from mgrpo.store.base import RunInfo, WeightVersion
from mgrpo.store.opening import STORE_VARIABLE, open_store
from mgrpo.types import Group, Parent, Reply, Reward, Rollout, Task, Trajectory, TrajectoryId, Turn

GROUPS_PER_STEP = 2
KILLS = 5
AGENTS = ("planner", "searcher")


def turn(group: int) -> Turn:
    return Turn(tuple(range(50)), tuple(range(group, group + 50)), (-0.5,) * 50, group, "stop", "x" * 200, Reply())


def rollout(group: int, index: int) -> Rollout:
    root = TrajectoryId(group, index, "planner", 0)
    children = [TrajectoryId(group, index, "searcher", i) for i in range(index)]
    nodes = [Trajectory(root, "q", (turn(group),) * 2, "answer")]
    nodes += [Trajectory(id, "sub", (turn(group),), "max_turns", parent=Parent(root, 0, 0)) for id in children]
    return Rollout(group, index, tuple(nodes))


def whole(group: int) -> tuple[Group, dict[TrajectoryId, Reward]]:
    made = Group(group, Task(f"t{group}", "q"), tuple(rollout(group, k) for k in range(4)))
    return made, {t.id: Reward(group / 3) for r in made.rollouts for t in r.trajectories}


def publication(agent: str, version: int) -> WeightVersion:
    return WeightVersion(agent, version, f"weights/{agent}/{version}", f"sha256:{version}", version, "rl")


def collect_and_learn(where: str) -> None:
    store = open_store(where, RunInfo(0))
    print("open", flush=True)
    for step in itertools.count(store.trained("searcher") // GROUPS_PER_STEP):
        ids = range(step * GROUPS_PER_STEP, (step + 1) * GROUPS_PER_STEP)
        if store.committed() < ids.stop:
            made = [whole(id) for id in ids]
            store.commit([group for group, _ in made], {id: r for _, rewards in made for id, r in rewards.items()})
        for agent in AGENTS:
            if store.trained(agent) < ids.stop:
                assert store.take(agent, ids.start, len(ids)) is not None
                store.publish(publication(agent, step + 1), ids, {"step": float(step)})


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_killed_run_leaves_whole_groups_and_agreeing_cursors(database: str, request: pytest.FixtureRequest) -> None:
    place = request.getfixturevalue({"sqlite": "tmp_path", "postgresql": "postgres_url"}[database])
    where = str(place / "s.db") if isinstance(place, Path) else place
    draw = random.Random(5)
    reached = [0]
    for _ in range(KILLS):
        kill_after(where, draw.uniform(0.02, 0.3))
        reached.append(check(where))
    assert reached == sorted(reached) and reached[-1] > reached[0], f"the run never got on: {reached}"


def kill_after(where: str, seconds: float) -> None:
    root = str(Path(mgrpo.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, STORE_VARIABLE: where}
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "open\n"
        time.sleep(seconds)
        assert victim.poll() is None, "the victim ended on its own"
        victim.kill()


def check(where: str) -> int:
    store = open_store(where)
    committed = store.committed()
    assert store.counts().groups == committed
    assert committed % GROUPS_PER_STEP == 0, "half of a commit is there"
    for id in range(committed):
        assert store.group(id) == whole(id)
    for agent in AGENTS:
        published = store.publications(agent)
        assert [id for p in published for id in p.consumed] == list(range(store.trained(agent)))
        assert [p.weights for p in published] == [publication(agent, n + 1) for n in range(len(published))]
        assert store.trained(agent) == GROUPS_PER_STEP * len(published) <= committed
    store.close()
    return committed


if __name__ == "__main__":
    collect_and_learn(os.environ[STORE_VARIABLE])
