"""What runs in the processes that chaos.py kills: `mgrpo serve`, `tools`, `collect` and `learn`, without a model.

::

    as it is     command line, run folder, store, leases, HTTP, both loops of train.py, rollouts, evaluations, weights:
                 staged, sealed, published, pruned, loaded
    scripted     the engine: turns are a pure function of the trajectory's id
    counting     the policy: its "weights" are the list of the groups it was trained on, each with a digest of what the
                 learner saw of it. So whatever version is published says what it is made of

A part appends to RUN/notes/NAME.jsonl what it achieves, with its process id: from that chaos.py knows when a killed
part is at work again. Groups say in their rewards which process collected them.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chaos_checks import SEEN, digest
from chaos_recipe import NOTES, moves, noted

from mgrpo import learning, train
from mgrpo.cli import main
from mgrpo.errors import LeaseLost
from mgrpo.store.sql import SqlStore
from mgrpo.types import Share

STEP_S = 0.01  # of a counting step
# What parts import when they first need it. In the nursery that is now, so that a fork need not.
LATE = (
    "mgrpo.parts",
    "mgrpo.cli.parts",
    "mgrpo.tasks.jsonl",
    "mgrpo.policy.tiny",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "anyio._backends._asyncio",
    "bm25s",
    "httpcore",
    "jinja2",
    "psycopg",
    "sqlite3",
    "uvicorn.lifespan.off",
    "uvicorn.protocols.http.auto",
)


def _noting(method: Callable[..., Any], values: Callable[..., Mapping[str, Any]]) -> Callable[..., Any]:
    """``method`` of a store, noted when it has written and when it was refused."""
    what = method.__name__

    def noting(store: SqlStore, *arguments: Any, **options: Any) -> Any:
        told = values(*arguments, **options)
        try:
            result = method(store, *arguments, **options)
        except LeaseLost as error:
            noted.write(f"{what} refused", **told, error=str(error))
            raise
        noted.write(what, **told)
        return result

    noting.__name__ = what
    return noting


# ---------------------------------------------------------------- the learner


class CountingPolicy:
    """Stands for `mgrpo.policy.update.Policy`."""

    def __init__(self, *_: Any) -> None:
        self.seen: list[str] = []
        self.model = None

    def begin(self, *_: Any) -> None:
        """No optimiser."""


class _Files:
    """Stands for the module `mgrpo.policy.checkpoint`."""

    @staticmethod
    def save(policy: CountingPolicy, folder: Path, stage: str) -> None:
        (folder / SEEN).write_text("".join(f"{line}\n" for line in policy.seen))

    @staticmethod
    def load(policy: CountingPolicy, folder: Path, stage: str) -> None:
        policy.seen = (folder / SEEN).read_text().splitlines()


def count(
    learner: learning.Learner, window: Any, taken: Mapping[str, Sequence[Share]], step: int, stage_step: int
) -> dict[str, dict[str, float]]:
    """Stands for `mgrpo.train.update`: takes note of every group. Some steps move no weights, as equal rewards do."""
    policy: Any = learner.policy
    time.sleep(STEP_S)
    if not moves(step):
        return {agent: {} for agent in taken}
    policy.seen += [f"{share.group} {digest(share)}" for shares in taken.values() for share in shares]
    return {agent: {"loss": 1.0} for agent in taken}


def settle(run: Path, name: str) -> None:
    """Put the scripted and counting parts in place of the real ones, in this process."""
    noted.open(run / NOTES / f"{name}.jsonl")
    stand_ins: Any = {"load_model": lambda *_: None, "Policy": CountingPolicy, "checkpoint": _Files}
    for key, value in stand_ins.items():
        setattr(learning, key, value)
    train.update = count  # type: ignore[assignment]
    written: Any = {
        "commit": lambda groups, rewards, lease=None: {"groups": [g.id for g in groups], "fence": lease.fence},
        "publish": lambda version, consumed, metrics=None, lease=None: {
            "agent": version.agent,
            "version": version.version,
            "groups": list(consumed),
            "fence": lease.fence,
        },
    }
    for method, values in written.items():
        setattr(SqlStore, method, _noting(getattr(SqlStore, method), values))


def part(name: str, argv: Sequence[str]) -> int:
    """What the nursery calls in a fork: a command of `mgrpo`. Returns its exit code."""
    settle(Path(argv[argv.index("--run") + 1]), name)
    try:
        main(argv)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    raise AssertionError("unreachable: every command ends by an exit")


if "nursery" in sys.argv[1:2]:
    for module in LATE:
        importlib.import_module(module)
