"""Which groups belong to which step of which stage: a pure function of the recipe, so that one integer is a cursor.

A *window* is what is collected, learned from and published together: ``weight_sync_steps`` optimiser steps of
``groups_per_step`` groups each. Groups are numbered through the whole run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mgrpo.config.model import Config, StageConfig
from mgrpo.errors import RunFolderError


@dataclass(frozen=True, slots=True)
class Window:
    stage_index: int
    stage: StageConfig
    first_group: int
    first_step: int  # counted through the run
    stage_step: int  # of the first step, counted in its stage

    @property
    def stage_group(self) -> int:
        """The first group of the stage."""
        return self.first_group - self.stage_step * self.stage.groups_per_step

    @property
    def end_group(self) -> int:
        return self.first_group + self.stage.weight_sync_steps * self.stage.groups_per_step

    @property
    def groups(self) -> range:
        return range(self.first_group, self.end_group)

    @property
    def steps(self) -> Iterator[tuple[int, int, range]]:
        """(step of the run, step of the stage, its groups) of every optimiser step."""
        size = self.stage.groups_per_step
        for i in range(self.stage.weight_sync_steps):
            first = self.first_group + i * size
            yield self.first_step + i, self.stage_step + i, range(first, first + size)


def windows(config: Config, from_group: int = 0) -> Iterator[Window]:
    """All windows that begin at ``from_group`` or later. Raises RunFolderError where that is inside a window."""
    group = step = 0
    for index, stage in enumerate(config.stages):
        for stage_step in range(0, stage.steps, stage.weight_sync_steps):
            window = Window(index, stage, group, step, stage_step)
            if window.first_group < from_group < window.end_group:
                raise RunFolderError(
                    f"group {from_group} lies inside a step of stage {stage.name!r}: the store was written with another"
                    " recipe (steps, groups_per_step or weight_sync_steps); resume with the recipe of the run folder"
                )
            if group >= from_group:
                yield window
            group, step = window.end_group, step + stage.weight_sync_steps


def cohorts(window: Window, size: int | None) -> Iterator[range]:
    """The groups of a window that are collected together, ``size`` at a time; None: all of them."""
    size = size or len(window.groups)
    for first in range(window.first_group, window.end_group, size):
        yield range(first, min(first + size, window.end_group))


def stage_start(config: Config, group: int) -> int:
    """The first group of the stage that ``group`` belongs to."""
    start = 0
    for stage in config.stages[:-1]:
        end = start + stage.steps * stage.groups_per_step
        if group < end:
            break
        start = end
    return start


def total_steps(config: Config) -> int:
    return sum(stage.steps for stage in config.stages)


def total_groups(config: Config) -> int:
    return sum(stage.steps * stage.groups_per_step for stage in config.stages)
