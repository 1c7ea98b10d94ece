"""The words that the tiny models of a recipe know: those of its tasks, its agents, its tools and its prompts."""

from __future__ import annotations

import re

from mgrpo.config.model import Config
from mgrpo.config.registry import settings
from mgrpo.errors import ConfigError

_PIECE = re.compile(r"\w+|[^\w\s]")  # as the tokenizer of tiny models cuts (policy/tiny.py)


def closed_vocabulary(config: Config) -> list[str]:
    """Sorted words. Raises ConfigError where the recipe's tasks have no closed vocabulary."""
    own = [*(stage.tasks for stage in config.stages), config.evaluation.tasks, config.evaluation.dev_tasks]
    texts = [*config.agents, *config.tools, *(agent.prompt for agent in config.agents.values())]
    words = {piece for text in texts for piece in pieces(text)}
    for table in (config.tasks, *(config.tasks_with(table) for table in own if table)):
        tasks = settings("tasks", table, "tasks")
        if not hasattr(tasks, "vocabulary"):
            raise ConfigError(
                f"tasks.type: {table['type']} has no closed vocabulary for tiny models; give every agent a model"
                " folder, or the settings of the tasks a method vocabulary()"
            )
        words.update(tasks.vocabulary())
    return sorted(words)


def pieces(text: str) -> list[str]:
    """Words and punctuation marks, in order."""
    return _PIECE.findall(text)
