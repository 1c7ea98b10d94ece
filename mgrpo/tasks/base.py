"""What is asked and how an answer is graded."""

from __future__ import annotations

from typing import Protocol

from mgrpo.types import Corpus, Grade, Task, Trajectory


class TaskSource(Protocol):
    """Tasks by index, so that a data cursor is one integer and any task can be asked for again."""

    def __len__(self) -> int:
        """How many tasks there are; sources that draw tasks without end return a very large number."""
        ...

    def task(self, index: int) -> Task:
        """The task at ``index``, always the same one. 0 <= index < len(self)."""
        ...

    def corpus(self, task: Task) -> Corpus | None:
        """The pages that the task's tools search; None when tools bring their own."""
        ...

    async def grade(self, task: Task, trajectory: Trajectory) -> Grade:
        """The root's final answer against the gold (r_correct); a child's against its subtask (r_expert)."""
        ...
