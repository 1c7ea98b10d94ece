"""Plug-ins by name: `type = "..."` in a recipe picks one, and its own settings model checks the rest of the table.

A plug-in is a pydantic model with a ``build`` method, declared in the file of the part it configures. A ``type`` with
a colon is a user's import path (``my_package.my_module:MySettings``): the same settings model, or any callable that
takes the table's other keys as keyword arguments and returns the part.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from mgrpo.errors import ConfigError

BUILTIN: Mapping[str, Mapping[str, str]] = {
    "tasks": {"world": "mgrpo.tasks.world:Settings", "jsonl": "mgrpo.tasks.jsonl:Settings"},
    "tool": {"search": "mgrpo.tools.search:Settings", "visit": "mgrpo.tools.visit:Settings"},
    "engine": {"local": "mgrpo.engines.local:Settings", "scripted": "mgrpo.engines.scripted:Settings"},
    "tracker": {
        "tensorboard": "mgrpo.report.trackers:TensorBoard",
        "wandb": "mgrpo.report.trackers:WandB",
        "trackio": "mgrpo.report.trackers:Trackio",
    },
}


@dataclass(frozen=True, slots=True)
class Factory:
    """A user's callable with the keyword arguments that its table gave."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    def build(self, **_: Any) -> Any:
        return self.function(**self.arguments)


def load_object(path: str, where: str) -> Any:
    """The object that ``package.module:name`` names; ConfigError that names the key ``where`` otherwise."""
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}: cannot import {path!r}: {error}") from error


def settings(kind: str, table: Mapping[str, Any], where: str) -> Any:
    """The checked settings of one plug-in table; call ``.build(...)`` on it to get the part."""
    known = BUILTIN[kind]
    type_ = table.get("type")
    if not isinstance(type_, str):
        raise ConfigError(f"{where}.type: missing; choose one of {', '.join(known)} or an import path module:name")
    if type_ not in known and ":" not in type_:
        raise ConfigError(f"{where}.type: unknown {kind} {type_!r}{suggest(type_, known)}")
    factory = load_object(known.get(type_, type_), f"{where}.type")
    if isinstance(factory, type) and issubclass(factory, BaseModel):
        try:
            return factory.model_validate(dict(table) if type_ in known else _without_type(table))
        except ValidationError as error:
            raise ConfigError(describe(error, factory, where)) from error
    return Factory(factory, _without_type(table))


def _without_type(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != "type"}


def suggest(word: str, known: Any) -> str:
    """`` (did you mean 'x'?)`` or the list of known words, to end an error message with."""
    names = [str(name) for name in known]
    close = difflib.get_close_matches(word, names, n=1)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f"; known: {', '.join(names)}" if names else ""


def describe(error: ValidationError, model: type[BaseModel], where: str = "") -> str:
    """The first fault of a pydantic error as one line: the key, what is wrong, and the nearest known key."""
    first = error.errors()[0]
    parts = [str(part) for part in first["loc"]]
    key = ".".join([where, *parts] if where else parts) or "recipe"
    if first["type"] == "extra_forbidden":
        fields = _fields_at(model, parts[:-1])
        return f"{key}: unknown key{suggest(parts[-1], fields)}"
    message = str(first["msg"]).removeprefix("Value error, ")
    got = "" if first["type"] in ("missing", "value_error") else f", got {first['input']!r}"
    return f"{key}: {message}{got}"


def _fields_at(model: type[BaseModel], path: list[str]) -> list[str]:
    """Field names of the model that ``path`` leads to; names of dict entries and list indexes are stepped over."""
    current: Any = model
    for part in path:
        if not (isinstance(current, type) and issubclass(current, BaseModel)):
            return []
        field = current.model_fields.get(part)
        if field is None:
            continue
        current = _model_in(field.annotation) or current
    return list(current.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_in(argument)
        if found is not None:
            return found
    return None
