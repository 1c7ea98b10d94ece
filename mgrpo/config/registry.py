"""Plug-ins by name: `type = "..."` in a recipe picks one, and its own settings model checks the rest of the table.

A plug-in is a pydantic model with a ``build`` method, declared in the file of the part it configures. A ``type`` with
a colon is a user's import path (``my_package.my_module:MySettings``): the same settings model, or any callable that
takes the table's other keys as keyword arguments and returns the part.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from mgrpo.errors import ConfigError

BUILTIN: Mapping[str, Mapping[str, str]] = {
    "tasks": {"world": "mgrpo.tasks.world:Settings", "jsonl": "mgrpo.tasks.jsonl:Settings"},
    "tool": {"search": "mgrpo.tools.search:Settings", "visit": "mgrpo.tools.visit:Settings"},
    "expert": {
        "gold": "mgrpo.tasks.expert:Gold",
        "rule": "mgrpo.tasks.expert:Rule",
        "judge": "mgrpo.tasks.judge:Settings",
    },
    "chat_engine": {"openai": "mgrpo.engines.openai:Settings"},
    "engine": {"local": "mgrpo.engines.local:Settings", "scripted": "mgrpo.engines.scripted:Settings"},
    "tracker": {
        "tensorboard": "mgrpo.report.trackers:TensorBoard",
        "wandb": "mgrpo.report.trackers:WandB",
        "trackio": "mgrpo.report.trackers:Trackio",
    },
}

# What the program hands to a part when it is built, beside the keys of its table: tasks get the run's seed, engines
# the model's folder and the function that writes a reply as token ids, trackers the run's folder and config, experts
# the task source.
OFFERED = frozenset({"seed", "folder", "encode", "config", "source"})
# Names of the alternatives `str | TinyModel`, which pydantic puts into the path of an error.
_UNION_BRANCHES = frozenset({"str", "TinyModel"})


@dataclass(frozen=True, slots=True)
class Factory:
    """A user's callable with the keyword arguments that its table gave."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    def build(self, **offered: Any) -> Any:
        """The part. Of what the program ``offered``, it gets what its signature names and the table leaves open."""
        wanted = inspect.signature(self.function).parameters.keys() & offered.keys() - self.arguments.keys()
        return self.function(**self.arguments, **{name: offered[name] for name in wanted})


def load_object(path: str, where: str) -> Any:
    """The object that ``package.module:name`` names; ConfigError that names the key ``where`` otherwise."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{where}: cannot import {path!r}: {error}") from error
    if not name or not hasattr(module, name):
        raise ConfigError(f"{where}: {module_name} holds no {name!r}{suggest(name, _public(module))}")
    return getattr(module, name)


def _public(module: Any) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_")]


def settings(kind: str, table: Mapping[str, Any], where: str) -> Any:
    """The checked settings of one plug-in table; call ``.build(...)`` on it to get the part."""
    known = BUILTIN[kind]
    type_ = table.get("type")
    if "type" in table and not isinstance(type_, str):
        raise ConfigError(f"{where}.type: must be text, got {shorten(type_)}")
    if type_ is None:
        raise ConfigError(f"{where}.type: missing; choose one of {', '.join(known)} or an import path module:name")
    if type_ not in known and ":" not in type_:
        raise ConfigError(f"{where}.type: unknown {kind} {type_!r}{suggest(type_, known)}")
    factory = load_object(known.get(type_, type_), f"{where}.type")
    if isinstance(factory, type) and issubclass(factory, BaseModel):
        try:
            return factory.model_validate(dict(table) if type_ in known else _without_type(table))
        except ValidationError as error:
            raise ConfigError(describe(error, factory, where)) from error
    return _factory(factory, _without_type(table), f"{where}", type_)


def _factory(function: Any, arguments: Mapping[str, Any], where: str, path: str) -> Factory:
    """Refuses a table whose keys are no parameters of ``function``."""
    if not callable(function):
        raise ConfigError(f"{where}.type: {path} is not callable; name a class or a function that makes the part")
    parameters = inspect.signature(function).parameters
    free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in arguments:
        if key not in parameters and not free:
            raise ConfigError(f"{where}.{key}: {path} has no such parameter{suggest(key, parameters)}")
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if required and name not in arguments and name not in OFFERED:
            raise ConfigError(f"{where}.{name}: missing; {path} needs it")
    return Factory(function, arguments)


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
    found = error.errors()
    # A table where text or a table may stand fails twice; what is wrong inside the table is the better half.
    first = next((e for e in found if not (e["type"] == "string_type" and isinstance(e["input"], dict))), found[0])
    parts = [str(part) for part in first["loc"] if part not in _UNION_BRANCHES]
    key = ".".join([where, *parts] if where else parts) or "recipe"
    if first["type"] == "extra_forbidden":
        fields = _fields_at(model, parts[:-1])
        return f"{key}: unknown key{suggest(parts[-1], fields)}"
    if first["type"] == "missing":
        return f"{key}: missing; this key is required"
    if first["type"] == "value_error":  # of our own validators, whose messages name the key of their table
        message = str(first["msg"]).removeprefix("Value error, ")
        return f"{key}.{message}" if message.partition(":")[0].isidentifier() else f"{key}: {message}"
    message = _WORDS.get(first["type"], str(first["msg"]).removeprefix("Input should ").removeprefix("String should "))
    return f"{key}: must {message}, got {shorten(first['input'])}"


# pydantic's types of errors whose own words speak of Python -> words about a recipe
_WORDS: Mapping[str, str] = {
    "bool_parsing": "be true or false",
    "dict_type": "be a table",
    "float_parsing": "be a number",
    "int_from_float": "be a whole number",
    "int_parsing": "be a whole number",
    "model_type": "be a table",
    "string_type": "be text",
    "tuple_type": "be a list",
}


def shorten(value: Any, limit: int = 60) -> str:
    """A value as it may stand in a message of one line."""
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


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
