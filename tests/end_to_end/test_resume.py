"""A run that is killed at any moment and resumed ends with the same weights, bit for bit, as one that was not."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from tiny_recipe import REINFORCE, WARM_UP, tiny

from mgrpo.report.metrics_log import read_metrics
from mgrpo.run import RunFolder
from mgrpo.store.base import WeightVersion

SECONDS = 120.0
AGENTS = ("planner", "searcher")
WARM = WARM_UP | {"steps": 20, "weight_sync_steps": 5, "groups_per_step": 8, "tasks": {"tasks_per_world": 8}}
LEARNERS = {"optimizer": "muon", "learning_rate": 2e-2, "warmup_steps": 4}
CONFIG = tiny(
    stages=[WARM | {"learner": LEARNERS}, REINFORCE | {"learner": {"kl_coef": 0.05, "num_iterations": 2}}],
    reward="tiny_recipe:token_reward",
    evaluation={
        "questions": 2,
        "tasks": {"split": "test"},
        "dev_tasks": {"split": "dev"},
        "dev_questions": 2,
        "every": 2,
        "closed_book": False,
        "examples": 0,
    },
)
GROUPS = 20 * 8 + 4 * 2

# What every child would import again: half of its time.
PRELOADED = (
    "mgrpo.train",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "bm25s",
)

# Places to die at: (module:attribute that is called, on which call, before it or after it).
Death = tuple[str, int, bool]
BEFORE, AFTER = True, False
DEATHS: tuple[Death, ...] = (
    ("mgrpo.run:dump", 1, AFTER),  # the folder is there, its recipe is not
    ("mgrpo.policy.tiny:write_tiny", 2, AFTER),  # one model is there, the other has its temporary name
    ("mgrpo.store.weights:json.dumps", 2, AFTER),  # version 0 of one agent is saved, of the other half saved
    ("mgrpo.store.sql:SqlStore.commit", 1, BEFORE),  # collected, not committed
    ("mgrpo.policy.update:Policy.update", 8, AFTER),  # inside the first warm-up window
    ("mgrpo.store.sql:SqlStore.publish", 5, BEFORE),  # a checkpoint that no publication names
    ("mgrpo.store.weights:_sync", 20, BEFORE),  # inside a checkpoint
    ("mgrpo.collecting:evaluate", 2, BEFORE),  # between stages, inside the evaluation
    ("mgrpo.store.weights:shutil.copy2", 1, AFTER),  # a reference for the KL term is half there
    ("mgrpo.store.weights:WeightStore.keep", 1, AFTER),  # one agent's reference is there, the other's is not
    ("mgrpo.store.sql:SqlStore.publish", 2, AFTER),  # one agent is a step ahead of the other
    ("mgrpo.learning:Learner.learned", 2, AFTER),  # a metrics line of a step that is done again
)


def train_until(folder: str, resume: bool, death: Death | None) -> None:
    """What a child process does."""
    from mgrpo.report.reporter import Reporter
    from mgrpo.train import train

    class Brief(Reporter):
        def finish(self, seconds: float) -> dict[str, Any]:
            return {}  # drawing curves takes longer than training here

    if death is not None:
        _arrange(death)
    path = Path(folder)
    train(CONFIG, path, resume=resume, reporter=Brief(path, CONFIG, quiet=True))


def _arrange(death: Death) -> None:
    place, on_call, before = death
    module, _, names = place.partition(":")
    *owners, name = names.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    function: Callable[..., Any] = getattr(owner, name)
    calls = count(1)

    def dying(*arguments: Any, **options: Any) -> Any:
        mine = next(calls)  # other threads call it too
        if mine == on_call and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **options)
        if mine == on_call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)


@pytest.fixture(scope="module")
def start() -> Callable[..., BaseProcess]:
    """Starts processes whose imports are done already: each is a fork of a server that has run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "tiny_recipe"])

    def begin(folder: Path, death: Death | None = None) -> BaseProcess:
        resume = (folder / "config.toml").exists()
        process = context.Process(target=train_until, args=(str(folder), resume, death))
        process.start()
        return process

    return begin


@pytest.fixture(scope="module")
def reference(start: Callable[..., BaseProcess], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """An uninterrupted run, and how long it took."""
    folder = tmp_path_factory.mktemp("reference")
    started = time.monotonic()
    finish(start(folder))
    return folder, time.monotonic() - started


def finish(process: BaseProcess) -> None:
    process.join(SECONDS)
    assert process.exitcode == 0, f"the run ended with {process.exitcode}"


def test_killed_at_chosen_places_and_resumed(
    start: Callable[..., BaseProcess], reference: tuple[Path, float], tmp_path: Path
) -> None:
    for death in DEATHS:
        process = start(tmp_path, death)
        process.join(SECONDS)
        assert process.exitcode == -signal.SIGKILL, f"{death}: ended with {process.exitcode}"
    finish(start(tmp_path))
    assert_same(tmp_path, reference[0])


def test_killed_at_random_moments_and_resumed(
    start: Callable[..., BaseProcess], reference: tuple[Path, float], tmp_path: Path
) -> None:
    draw = random.Random(11)
    for _ in range(4):
        process = start(tmp_path)
        process.join(draw.uniform(0.1, 0.6) * reference[1])
        process.kill()
        process.join(SECONDS)
    finish(start(tmp_path))
    assert_same(tmp_path, reference[0])


def test_the_reference_trained_every_agent_in_both_stages(reference: tuple[Path, float]) -> None:
    records = [record for record in read_metrics(reference[0]) if record["kind"] == "learn" and record.get("tokens")]
    for agent in AGENTS:
        mine = [record["stage"] for record in records if record["agent"] == agent]
        assert mine.count("warm_up") == 20 and mine.count("reinforce") >= 2


def same(weights: WeightVersion) -> WeightVersion:
    """Without the place, which tells how often a process was granted the lease."""
    return replace(weights, handle="")


def assert_same(folder: Path, reference: Path) -> None:
    (_, here), (_, there) = RunFolder(folder).open(), RunFolder(reference).open()
    for agent in AGENTS:
        mine, theirs = here.publications(agent), there.publications(agent)
        assert [same(p.weights) for p in mine] == [same(p.weights) for p in theirs]
        assert [id for p in mine for id in p.consumed] == list(range(GROUPS))
        newest = mine[-1].weights
        assert sha256((folder / newest.handle / "manifest.json").read_bytes()).hexdigest() == newest.checksum
    for id in range(GROUPS):
        assert here.group(id) == there.group(id)
    here.close()
    there.close()
    assert told(folder) == told(reference)
    assert not [path for path in folder.rglob(".*") if path.name != ".lock"]


def told(folder: Path) -> list[tuple[str, int, str, dict[str, Any]]]:
    """metrics.jsonl without what depends on the clock, and without alarms: a new process warns of old trouble again."""
    clock = ("time", "seconds", "tokens_per_second", "store_bytes")
    records = [record for record in read_metrics(folder) if record["kind"] != "alarm"]
    keyed = [(r["kind"], r["step"], str(r.get("agent", r.get("name", "")))) for r in records]
    assert len(set(keyed)) == len(keyed)
    found = [(*key, {k: v for k, v in r.items() if k not in clock}) for key, r in zip(keyed, records, strict=True)]
    return sorted(found, key=lambda record: record[:3])
