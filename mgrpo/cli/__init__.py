"""The command line. Parts are imported where they are used, so that `mgrpo --help` answers at once."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from mgrpo import __version__
from mgrpo.errors import DataError, InfrastructureError, RunFolderError, UserError

_MISTAKE, _INFRASTRUCTURE, _INTERRUPTED = 2, 1, 130  # exit codes; 130 is what shells give a program ended by Ctrl-C

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Begin with:  mgrpo train recipes/quickstart.toml\n\n"
    "Exit codes: 0 done, 1 something outside failed, 2 yours to mend (one line says what), 130 interrupted.",
)

RECIPE = typer.Argument(
    metavar="RECIPE", help="A TOML file that says who learns what; recipes/ holds some.", show_default=False
)
RUN = typer.Argument(metavar="RUN", help="The folder of a run, for instance runs/quickstart.", show_default=False)
SET = typer.Option(
    [],
    "--set",
    metavar="KEY=VALUE",
    help="Change one value of the recipe; may be given many times. KEY is a path with dots, stages count from 0,"
    " VALUE is TOML; a bare word is a string.",
    show_default=False,
)
# Parent of whatever is wrong with a command line; typer gives it no public name.
_UsageError: Any = typer.BadParameter.__base__


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit. ``arguments`` defaults to those of the process."""
    sys.path.append(os.getcwd())  # a console script does not see the user's own modules; last, so as to shadow nothing
    try:
        code = app(None if arguments is None else list(arguments), prog_name="mgrpo", standalone_mode=False)
    except _UsageError as error:
        _explain(error)
    except UserError as error:
        _fail(str(error), _MISTAKE)
    except InfrastructureError as error:
        _fail(f"{type(error).__name__}: {error}", _INFRASTRUCTURE)
    sys.exit(code if isinstance(code, int) else 0)


def _explain(error: Any) -> None:
    """One line for a wrong command line; the help where nothing was said at all."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(_MISTAKE)
    command = error.ctx.command_path if error.ctx is not None else "mgrpo"
    _fail(f"{error.format_message()} (see {command} --help)", _MISTAKE)


def _fail(message: str, code: int) -> None:
    print("error: " + " ".join(message.splitlines()), file=sys.stderr)
    sys.exit(code)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"mgrpo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Train a planner and its tool-using sub-agents together, each with its own language model (M-GRPO)."""


# ---------------------------------------------------------------- train, plan


@app.command(
    epilog="mgrpo train recipes/quickstart.toml\n\n"
    "mgrpo train recipes/quickstart.toml --seed 1 --run runs/seed1\n\n"
    "mgrpo train recipes/quickstart.toml --set stages.2.steps=100 --set agents.searcher.align=resample\n\n"
    "mgrpo train runs/quickstart --resume"
)
def train(
    recipe: Path = RECIPE,
    run: Path | None = typer.Option(
        None, help="Where everything of the run goes.", show_default="runs/ and the recipe's name"
    ),
    resume: bool = typer.Option(
        False, "--resume", help="Go on with a run that stopped. RECIPE may then be the run's folder itself."
    ),
    seed: int | None = typer.Option(None, help="Of everything that is drawn.", show_default="the recipe's"),
    set_: list[str] = SET,
) -> None:
    """Train the agents of RECIPE, stage by stage, and evaluate them before and after.

    Ctrl-C stops; what was finished by then is on disk already, and the command that goes on is printed.
    """
    folder: Path | None = None
    try:
        from mgrpo.config import load

        recipe, run = located(recipe, run)
        config = load(recipe, [*set_, *([] if seed is None else [f"seed={seed}"])])
        folder = run or config.default_folder

        from mgrpo.train import train as train_

        train_(config, folder, resume)
    except KeyboardInterrupt:
        begun = folder is not None and (folder / "config.toml").is_file()
        hint = f"go on with: mgrpo train {shlex.quote(str(folder))} --resume" if begun else "nothing was begun"
        print(f"interrupted; {hint}", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None


def located(recipe: Path, run: Path | None) -> tuple[Path, Path | None]:
    """The recipe's file and the run's folder: a run's own recipe belongs to its folder."""
    if recipe.is_dir():
        recipe = recipe / "config.toml"
        if not recipe.is_file():
            raise RunFolderError(f"{recipe.parent}: no run there (no config.toml); name a recipe, a .toml file")
    own = recipe.name == "config.toml" and any((recipe.parent / name).is_file() for name in ("store.db", ".lock"))
    return recipe, recipe.parent if own and run is None else run


@app.command(epilog="mgrpo plan recipes/quickstart.toml --set agents.planner.num_generations=4")
def plan(recipe: Path = RECIPE, set_: list[str] = SET) -> None:
    """Explain RECIPE without running it: who learns what from whom, by which formulas, and what it takes."""
    from rich.console import Console

    from mgrpo.config import load
    from mgrpo.report.plan import plan as plan_
    from mgrpo.report.plan import plan_text

    config, console = load(located(recipe, None)[0], set_), Console()
    if console.is_terminal:
        console.print(plan_(config))
    else:
        print(plan_text(config))


# ---------------------------------------------------------------- evaluate


@app.command(
    epilog="mgrpo evaluate runs/quickstart --temperature 0\n\n"
    "mgrpo evaluate runs/quickstart --questions 50 --k 4 --json scores.json"
)
def evaluate(
    run: Path = RUN,
    questions: int | None = typer.Option(
        None, min=1, help="How many different questions.", show_default="the recipe's"
    ),
    k: int = typer.Option(1, "--k", min=1, help="Attempts at each question; scores are means over all attempts."),
    temperature: float | None = typer.Option(
        None, min=0.0, help="Of sampling; 0 takes the likeliest words.", show_default="the recipe's"
    ),
    closed_book: bool = typer.Option(False, "--closed-book", help="Take every tool away: what is known by heart?"),
    split: str = typer.Option("test", help="Which questions: test or dev. Neither is trained on."),
    json_file: Path | None = typer.Option(None, "--json", help="Write all metrics to this file too."),
) -> None:
    """Ask the newest agents of RUN questions they were not trained on, and grade the answers."""
    import asyncio

    from rich.console import Console

    if split not in ("test", "dev"):
        raise UserError(f"--split {split}: choose test or dev")
    if json_file is not None and not json_file.parent.is_dir():
        raise DataError(f"--json {json_file}: the folder {json_file.parent} does not exist")

    from mgrpo.evaluate import evaluate as evaluate_
    from mgrpo.team import Team

    team = Team.load(run)
    plan = team.config.evaluation
    source = team.questions("tasks" if split == "test" else "dev_tasks")
    count = min(questions or (plan.questions if split == "test" else plan.dev_questions), len(source))
    with team, Console(stderr=True).status(f"asking {count} questions"):
        result = asyncio.run(evaluate_(team, source, count, k, temperature, closed_book, team.config.seed))
    asked = {"questions": count, "k": k, "temperature": temperature, "closed_book": closed_book, "split": split}
    sampling = _sampling(team.config, temperature, closed_book)
    _print_metrics(f"{run}: {count} {split} questions, {k} attempts each, {sampling}", result.metrics)
    if json_file is not None:
        json_file.write_text(json.dumps(asked | {"metrics": dict(result.metrics)}, indent=2) + "\n", encoding="utf-8")


def _sampling(config: Any, temperature: float | None, closed_book: bool) -> str:
    """How the answers came about, in words."""
    own = ", ".join(f"{agent.temperature:g} ({name})" for name, agent in config.agents.items())
    return f"temperature {own if temperature is None else f'{temperature:g}'}" + (", no tools" if closed_book else "")


_MEANINGS = {
    "success": "questions answered right",
    "sub_answer": "subtasks answered right",
    "calls_per_rollout": "delegations per attempt",
    "zero_call_fraction": "attempts without delegation",
    "unknown_fraction": "trajectories that nobody could grade",
    "failed_rollouts": "attempts that failed by infrastructure",
}


def _print_metrics(title: str, metrics: Any) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from mgrpo.report.notation import fixed

    table = Table(title=Text(title), title_justify="left")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for key, value in metrics.items():
        if key in _MEANINGS:
            table.add_row(_MEANINGS[key], str(value) if isinstance(value, int) else fixed(value, 3))
        elif key.startswith("failures/"):
            table.add_row(f"failures: {key.removeprefix('failures/')}", str(value))
        elif key.startswith(("reward/", "invalid_format/")):
            what, agent = key.split("/")
            table.add_row(f"{what.replace('_', ' ')} of {agent}", fixed(value, 3))
    Console().print(table)


# ---------------------------------------------------------------- ask, export


@app.command(epilog='mgrpo ask runs/quickstart\n\nmgrpo ask runs/quickstart "What is the population of Kinix ?"')
def ask(
    run: Path = RUN,
    question: str | None = typer.Argument(
        None, metavar="QUESTION", help="What to ask.", show_default="the test question's own"
    ),
    task: int = typer.Option(0, min=0, help="The test question whose web is searched."),
    temperature: float = typer.Option(0.0, min=0.0, help="Of sampling; 0 takes the likeliest words."),
) -> None:
    """Ask the newest agents of RUN one question, and show who did what to answer it."""
    from dataclasses import replace

    from rich.console import Console

    from mgrpo.report.tree import rollout_tree
    from mgrpo.team import Team

    team = Team.load(run)
    source = team.questions()
    if task >= len(source):
        raise UserError(f"--task {task}: choose 0 to {len(source) - 1}")
    at_hand = source.task(task)
    asked = at_hand if question is None else replace(at_hand, question=question, answer=None)
    with team:
        rollout = team.ask(asked.question, at_hand, temperature)
    Console().print(rollout_tree(rollout, {}, asked))


@app.command(epilog="mgrpo export runs/quickstart searcher models/searcher")
def export(
    run: Path = RUN,
    agent: str = typer.Argument(metavar="AGENT", help="The agent's name in the recipe.", show_default=False),
    folder: Path = typer.Argument(metavar="DIR", help="A new or empty folder.", show_default=False),
    version: int | None = typer.Option(None, min=0, help="Which weights.", show_default="the newest"),
) -> None:
    """Write one trained agent as a plain Hugging Face folder: config, safetensors, tokenizer, chat template.

    AutoModelForCausalLM.from_pretrained(DIR) and AutoTokenizer.from_pretrained(DIR) load it without this package.
    """
    from mgrpo.config.registry import suggest
    from mgrpo.policy.export import export as export_
    from mgrpo.run import RunFolder
    from mgrpo.team import tokenizer_of

    runs = RunFolder(run)
    config, store = runs.open()
    try:
        if agent not in config.agents:
            raise UserError(f"{run}: no agent {agent!r}{suggest(agent, config.agents)}")
        owner = config.owner(agent)
        if owner not in config.learners:
            raise UserError(f"{run}: agent {agent!r} was not trained; its model is {config.agents[owner].model}")
        weights = runs.published(store, owner, version)
        verified = runs.weight_store(config, store.run).get(weights.handle, weights.checksum)
    finally:
        store.close()
    export_(verified, tokenizer_of(runs.models(config)[owner]), folder)
    print(f"{agent} version {weights.version} of {run} is in {folder}")


from mgrpo.cli import parts  # noqa: E402, F401  (its commands join the app)
