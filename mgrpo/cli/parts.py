"""The commands that run one part of a run, or all of them, as processes."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import typer

from mgrpo.cli import RECIPE, SET, app, located

_RUN_OPTION = typer.Option(None, "--run", help="This machine's folder of the run.", show_default="runs/NAME")
_STORE = typer.Option(
    None,
    "--store",
    metavar="URL",
    help="The run's database, without a password (PGPASSWORD, ~/.pgpass or MGRPO_STORE hold it).",
    show_default="the recipe's, else a file in the run folder",
)
_WEIGHTS = typer.Option(
    None,
    "--weights",
    metavar="URL",
    help="Where weights are kept: a path or any fsspec URL.",
    show_default="the recipe's, else the run folder",
)
_NAME = typer.Option(
    None, "--name", help="Unique in the run. A part that comes back under its name takes up its work at once.",
    show_default="kind, host and process",
)  # fmt: skip
_HOST = typer.Option("127.0.0.1", "--host", help="Any but loopback needs a token in MGRPO_TOKEN.")
_PORT = typer.Option(0, "--port", min=0, max=65535, help="0 takes a free one.")
_AGENT = typer.Argument(metavar="AGENT", help="The agent's name in the recipe.", show_default=False)


@app.command(
    epilog="mgrpo launch recipes/quickstart.toml --set launch.collectors=2\n\nmgrpo launch runs/quickstart --resume"
)
def launch(
    recipe: Path = RECIPE,
    run: Path | None = _RUN_OPTION,
    resume: bool = typer.Option(False, "--resume", help="Go on with a run that stopped; RECIPE may be its folder."),
    store: str | None = _STORE,
    weights: str | None = _WEIGHTS,
    set_: list[str] = SET,
) -> None:
    """Train RECIPE with every part in a process of its own on this machine: engines, tools, collectors, learners.

    A part that dies is started again. Ctrl-C stops all of them; nothing that was committed is lost.
    """
    from mgrpo.launch import launch as launch_
    from mgrpo.launch import part_plans
    from mgrpo.run import RunFolder

    config, folder, _ = _part("launch", recipe, run, set_, store=store, weights=weights, name=None)
    run_folder = RunFolder(folder)
    with closing(run_folder.join(config, resume)) as hold:
        run_folder.models(hold.config)  # before the parts want them all at once

        def announced() -> list[tuple[str, str, str, int, str]]:
            return [(p.name, p.kind, p.agent, p.version, p.state) for p in hold.store.parts()]

        code = launch_(hold.config, folder, part_plans(hold.config, folder), announced)
    if code:
        print(f"interrupted; go on with: mgrpo launch {shlex.quote(str(folder))} --resume", file=sys.stderr)
    raise typer.Exit(code)


def _part(kind: str, recipe: Path, run: Path | None, options: list[str], **given: Any) -> tuple[Any, Path, str]:
    """(config, folder, name) of a part."""
    from mgrpo.config import load
    from mgrpo.parts import default_name, end_cleanly
    from mgrpo.run import RunFolder

    end_cleanly()
    recipe, run = located(recipe, run)
    own = [f"{key}={json.dumps(given[key])}" for key in ("store", "weights") if given[key] is not None]
    config = load(recipe, [*options, *own])
    folder, name = run or config.default_folder, given["name"] or default_name(kind)
    RunFolder(folder).part(name)
    return config, folder, name


@app.command(epilog="mgrpo serve searcher recipes/quickstart.toml --run runs/quickstart")
def serve(
    agent: str = _AGENT, recipe: Path = RECIPE, run: Path | None = _RUN_OPTION, store: str | None = _STORE,
    weights: str | None = _WEIGHTS, name: str | None = _NAME, host: str = _HOST, port: int = _PORT,
    set_: list[str] = SET,
) -> None:  # fmt: skip
    """Serve the newest weights of AGENT to the collectors of a run, over HTTP, until interrupted."""
    from mgrpo.parts import serve_part

    config, folder, own = _part(f"serve-{agent}", recipe, run, set_, store=store, weights=weights, name=name)
    serve_part(config, folder, agent, own, host, port)


@app.command(epilog="mgrpo tools recipes/quickstart.toml --run runs/quickstart")
def tools(
    recipe: Path = RECIPE, run: Path | None = _RUN_OPTION, store: str | None = _STORE, name: str | None = _NAME,
    host: str = _HOST, port: int = _PORT, set_: list[str] = SET,
) -> None:  # fmt: skip
    """Serve the tools of RECIPE to the collectors of a run, over HTTP, until interrupted."""
    from mgrpo.parts import tools_part

    config, folder, own = _part("tools", recipe, run, set_, store=store, weights=None, name=name)
    tools_part(config, folder, own, host, port)


@app.command(epilog="mgrpo collect recipes/quickstart.toml --run runs/quickstart")
def collect(
    recipe: Path = RECIPE, run: Path | None = _RUN_OPTION, store: str | None = _STORE,
    weights: str | None = _WEIGHTS, name: str | None = _NAME, set_: list[str] = SET,
) -> None:  # fmt: skip
    """Collect rollouts for a run, through the engines and tools of other processes, until it is complete.

    Any number may work at once; each may come late and leave early.
    """
    from mgrpo.parts import collect_part

    collect_part(*_part("collect", recipe, run, set_, store=store, weights=weights, name=name))


@app.command(epilog="mgrpo learn planner recipes/quickstart.toml --run runs/quickstart")
def learn(
    agent: str = _AGENT, recipe: Path = RECIPE, run: Path | None = _RUN_OPTION, store: str | None = _STORE,
    weights: str | None = _WEIGHTS, name: str | None = _NAME, set_: list[str] = SET,
) -> None:  # fmt: skip
    """Train the weights of AGENT from what is collected, until the run is complete."""
    from mgrpo.parts import learn_part

    config, folder, own = _part(f"learn-{agent}", recipe, run, set_, store=store, weights=weights, name=name)
    learn_part(config, folder, agent, own)
