"""TOML in, checked `Config` out: presets filled in, `--set a.b=c` applied, every plug-in table validated."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from mgrpo.config.check import check
from mgrpo.config.model import Config
from mgrpo.config.presets import with_preset
from mgrpo.config.registry import describe, settings, suggest
from mgrpo.errors import ConfigError


def load(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a recipe. Raises ConfigError with one line that names the file and the key."""
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such recipe") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not readable as TOML: {error}") from error
    for override in overrides:
        apply_override(table, override)
    try:
        return resolve(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def resolve(table: Mapping[str, Any]) -> Config:
    """A checked Config from a plain table (what a recipe holds)."""
    try:
        config = Config.model_validate(with_prompts(with_preset(table)))
    except ValidationError as error:
        raise ConfigError(describe(error, Config)) from error
    check(config)
    return config


def apply_override(table: dict[str, Any], override: str) -> None:
    """``a.b.0.c=value`` with the value in TOML; a bare word is a string. Lists are indexed by number."""
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise ConfigError(f"--set {override}: expected KEY=VALUE")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    target: Any = table
    *parents, last = path.strip().split(".")
    agents = table.get("agents")
    if parents[:1] == ["agents"] and isinstance(agents, dict) and (name := [*parents, last][1]) not in agents:
        raise ConfigError(f"--set {path}: unknown agent {name!r}{suggest(name, agents)}")
    try:
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target.setdefault(part, {})
        target[int(last) if isinstance(target, list) else last] = value
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise ConfigError(f"--set {path}: there is no such place in the recipe") from error


def with_prompts(table: Mapping[str, Any]) -> dict[str, Any]:
    """Prompts that name a .md or .txt file replaced by its text, so that a run holds what its agents were told."""
    agents = table.get("agents")
    if not isinstance(agents, Mapping):
        return dict(table)
    filled = {
        name: {**agent, "prompt": _prompt(agent["prompt"], f"agents.{name}.prompt")}
        if isinstance(agent, Mapping) and isinstance(agent.get("prompt"), str)
        else agent
        for name, agent in agents.items()
    }
    return {**table, "agents": filled}


def _prompt(prompt: str, where: str) -> str:
    if not prompt.endswith((".md", ".txt")) or len(prompt.split()) != 1:
        return prompt
    try:
        return Path(prompt).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {prompt}: {getattr(error, 'strerror', None) or error}") from error


def settled(config: Config, threads: int) -> Config:
    """The recipe as a run keeps it, whoever goes on with it and wherever: absolute paths, a number of threads."""
    table = config.model_dump(mode="json") | {"threads": config.threads or threads}
    for name, agent in config.agents.items():
        own = table["agents"][name]
        if isinstance(agent.model, str):
            own["model"] = str(Path(agent.model).absolute())
        own["engine"] = _absolute("engine", agent.engine, agent.engine)
    table["tools"] = {name: _absolute("tool", own, own) for name, own in config.tools.items()}
    table["trackers"] = [_absolute("tracker", own, own) for own in config.trackers]
    table["tasks"] = _absolute("tasks", config.tasks, config.tasks)
    table["expert"] = _absolute("expert", config.expert, config.expert)
    stages = zip(table["stages"], config.stages, strict=True)
    asked = [(table["evaluation"], key, getattr(config.evaluation, key)) for key in ("tasks", "dev_tasks")]
    for place, key, own in [*((place, "tasks", stage.tasks) for place, stage in stages), *asked]:
        place[key] = _absolute("tasks", own, config.tasks_with(own))
    return Config.model_validate(table)


def _absolute(kind: str, own: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """``own`` with the values that the settings of the ``whole`` table know as paths made absolute."""
    plan = settings(kind, whole, kind)
    paths = {key: value for key in own if isinstance(value := getattr(plan, key, None), Path)}
    return {**own, **{key: str(path.absolute()) for key, path in paths.items()}}


def dump(config: Config) -> str:
    """The resolved recipe as TOML; reading it back gives the same Config."""
    return tomli_w.dumps(_without_none(config.model_dump(mode="json")))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
