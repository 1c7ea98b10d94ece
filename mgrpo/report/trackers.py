"""Where metrics go beside metrics.jsonl, by option: TensorBoard, Weights & Biases, trackio.

A tracker has two methods: ``log(step, values)`` with flat names and numbers, and ``close()``.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel

from mgrpo.config import Config
from mgrpo.errors import ConfigError


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record ``values`` at the global ``step``. Called several times for a step, with different names."""
        ...

    def close(self) -> None: ...


class TensorBoard(BaseModel, extra="forbid", frozen=True):
    """``folder`` defaults to tensorboard/ in the run folder. Read it with ``tensorboard --logdir``."""

    type: Literal["tensorboard"] = "tensorboard"
    folder: Path | None = None

    def check(self) -> Any:
        """The package. Raises ConfigError when it is not installed."""
        return _package("tensorboard")

    def build(self, folder: Path, config: Config) -> Tracker:
        """Raises ConfigError when tensorboard is not installed."""
        self.check()
        return _EventFile(self.folder or folder / "tensorboard")


class WandB(BaseModel, extra="forbid", frozen=True):
    """Mode "offline" writes wandb/ in the run folder; ``wandb sync`` sends it later. "online" needs an account."""

    type: Literal["wandb"] = "wandb"
    project: str = "mgrpo"
    mode: Literal["offline", "online", "disabled"] = "offline"

    def check(self) -> Any:
        """The package. Raises ConfigError when it is not installed."""
        return _package("wandb")

    def build(self, folder: Path, config: Config) -> Tracker:
        """Raises ConfigError when wandb is not installed."""
        wandb = self.check()
        run = wandb.init(
            project=self.project,
            name=config.name,
            dir=str(folder),
            mode=self.mode,
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off"),
            reinit="create_new",
        )
        # Its own step must never fall, and collecting may be ahead of learning.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return _WandbRun(run)


class Trackio(BaseModel, extra="forbid", frozen=True):
    """Local by default (``trackio show`` reads it); ``space_id`` sends it to a Hugging Face Space."""

    type: Literal["trackio"] = "trackio"
    project: str = "mgrpo"
    space_id: str | None = None

    def check(self) -> Any:
        """The package. Raises ConfigError when it is not installed."""
        return _package("trackio")

    def build(self, folder: Path, config: Config) -> Tracker:
        """Raises ConfigError when trackio is not installed."""
        trackio = self.check()
        return _TrackioRun(
            trackio.init(
                project=self.project,
                name=f"{config.name}-{folder.name}",
                space_id=self.space_id,
                config=config.model_dump(mode="json"),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        )


class _EventFile:
    """TensorBoard's own event writer, which needs neither torch nor TensorFlow."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        points = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=points)))

    def close(self) -> None:
        self._writer.close()


class _WandbRun:
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class _TrackioRun:
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"trackers: {name} is not installed ({error}); run: pip install mgrpo[{name}]") from error
