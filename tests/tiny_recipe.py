"""The smallest recipes that train for real: one or two tiny models, a small world, a warm-up, a few steps."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mgrpo.config import Config, resolve
from mgrpo.types import Reward, Rollout, TrajectoryId

MODEL = {"type": "tiny", "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2}
WARM_UP = {
    "name": "warm_up",
    "collect": "teacher",
    "steps": 4,
    "weight_sync_steps": 2,
    "groups_per_step": 3,
    "num_generations": 1,
    "learner": {"optimizer": "muon", "learning_rate": 3e-3},
}
REINFORCE = {"name": "reinforce", "steps": 4, "groups_per_step": 2, "num_generations": 3}


def _agent(role: str, tools: list[str], **options: Any) -> dict[str, Any]:
    limits = {"max_turns": 3, "max_tokens_per_turn": 10, "max_context": 160}
    return {"role": role, "model": MODEL, "format": "compact", "tools": tools, **limits, **options}


def table(**options: Any) -> dict[str, Any]:
    """A planner and a searcher; ``options`` replace whole keys of the recipe."""
    recipe = {
        "name": "tiny",
        "threads": 1,
        "agents": {
            "planner": _agent("planner", ["searcher"]),
            "searcher": _agent("subagent", ["search", "visit"], trajectories_per_rollout=2),
        },
        "tools": {"search": {"type": "search"}, "visit": {"type": "visit"}},
        "tasks": {"type": "world", "countries": 8, "families": {"one_hop": 1, "two_hop": 1}},
        "learner": {"learning_rate": 1e-3},
        "stages": [WARM_UP, REINFORCE],
        "evaluation": {"questions": 3, "tasks": {"split": "test"}, "dev_tasks": {"split": "dev"}, "examples": 1},
        "store_timeout_s": 60.0,
    }
    return recipe | options


def team_of_one(**options: Any) -> dict[str, Any]:
    """A single agent that searches and visits by itself."""
    return table(agents={"planner": _agent("planner", ["search", "visit"], **options.pop("agent", {}))}, **options)


def tiny(**options: Any) -> Config:
    return resolve(table(**options))


def token_reward(rollout: Rollout, *_: Any) -> dict[TrajectoryId, Reward]:
    """Worth that varies however badly a model acts: the remainder of its sampled ids' sum. Usable as `reward`."""
    sums = {t.id: sum(id for turn in t.turns for id in turn.token_ids) for t in rollout.trajectories}
    return {id: Reward(total % 7 / 6, {"remainder": total % 7 / 6}) for id, total in sums.items()}


def train_briefly(config: Config, folder: Path, resume: bool = False) -> list[dict[str, Any]]:
    """Train without what takes longer than tiny steps: evaluations and curves. Returns the records of metrics.jsonl."""
    from mgrpo.collecting import Collector
    from mgrpo.report.metrics_log import read_metrics
    from mgrpo.report.reporter import Reporter
    from mgrpo.train import train

    async def nothing(*_: Any) -> None:
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collector, "evaluate_fully", nothing)
        patch.setattr(Reporter, "finish", lambda *_: {})
        train(config, folder, resume=resume, reporter=Reporter(folder, config, quiet=True))
    return list(read_metrics(folder))


@cache
def warmed_team() -> dict[str, str]:
    """A model folder for each agent of `table` that saw enough demonstrations to delegate, and to answer at times."""
    from mgrpo.run import RunFolder

    home = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    warm = WARM_UP | {"steps": 80, "weight_sync_steps": 20, "groups_per_step": 16, "tasks": {"tasks_per_world": 8}}
    config = tiny(stages=[warm | {"learner": {"optimizer": "muon", "learning_rate": 2e-2}}])
    train_briefly(config, home / "run")
    _, store = RunFolder(home / "run").open()
    for agent in config.agents:
        newest = store.latest(agent)
        assert newest is not None
        shutil.copy(home / "run" / newest.handle / "model.safetensors", home / "run" / "models" / agent)
    store.close()
    return {agent: str(home / "run" / "models" / agent) for agent in config.agents}
