"""The commands of `mgrpo`, from help to Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
from command_line import COMMAND, ENVIRONMENT, SMOKE, contents, mgrpo, refused, smoke_run
from report_samples import failed, group_of, rollout

from mgrpo import __version__
from mgrpo.evaluate import Evaluation
from mgrpo.report.metrics import rollout_metrics
from mgrpo.run import RunFolder

# ---------------------------------------------------------------- help


@pytest.mark.parametrize("command", ["train", "plan", "evaluate", "ask", "export"])
def test_every_command_explains_every_option_and_shows_an_example(command: str) -> None:
    help = mgrpo(command, "--help")
    assert help.code == 0
    assert f"mgrpo {command} r" in help.out  # an example
    lines = [line for line in help.out.splitlines() if line.startswith("│ --")]
    assert lines and all(len(line.strip("│ ").split("  ")) > 1 for line in lines), help.out


def test_version() -> None:
    assert mgrpo("--version").out == f"mgrpo {__version__}\n"


def test_no_command_shows_the_help() -> None:
    result = mgrpo()
    assert result.code == 2 and "evaluate" in result.out + result.err


# ---------------------------------------------------------------- train


def test_a_run_has_its_recipe_metrics_weights_and_summary() -> None:
    run = smoke_run()
    summary = json.loads((run / "summary.json").read_text())
    assert {"seconds", "seed", "success_before", "success_after", "closed_book"} <= summary.keys()
    kinds = {json.loads(line)["kind"] for line in (run / "metrics.jsonl").read_text().splitlines()}
    assert {"collect", "learn", "evaluate", "stage"} <= kinds
    config, store = RunFolder(run).open()
    try:
        assert store.committed() == sum(stage.steps * stage.groups_per_step for stage in config.stages)
        assert all(store.trained(agent) == store.committed() for agent in config.agents)
    finally:
        store.close()


def test_seed_set_and_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    changes = ("--set", "name=short", "--set", "stages.0.steps=2", "--set", "stages.1.steps=1")
    assert mgrpo("train", SMOKE, "--seed", "7", *changes, "--set", "evaluation.every=0").code == 0
    config, store = RunFolder(Path("runs/short")).open()
    store.close()
    assert (config.seed, config.name, config.stages[0].steps) == (7, "short", 2)


def test_a_finished_run_resumes_to_the_same_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(smoke_run(), run)
    weights = contents(run / "weights")
    took = json.loads((run / "summary.json").read_text())["seconds"]
    assert mgrpo("train", run, "--resume").code == 0  # the folder stands for its own recipe
    assert contents(run / "weights") == weights
    assert json.loads((run / "summary.json").read_text())["seconds"] == took


def test_a_run_with_a_model_folder_goes_on_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    shutil.copytree(smoke_run() / "models" / "planner", tmp_path / "here" / "model")
    monkeypatch.chdir(tmp_path / "here")
    assert mgrpo("train", SMOKE, "--run", "run", "--set", "agents.planner.model=model").code == 0
    monkeypatch.chdir(tmp_path)
    assert mgrpo("train", "here/run", "--resume").code == 0
    assert mgrpo("ask", "here/run").code == 0


def test_ctrl_c_saves_and_names_the_command_that_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    changes = ["--set", "stages.1.steps=20", "--set", "evaluation.every=0"]
    arguments = ["train", str(SMOKE), "--run", str(run), *changes]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A shell's background jobs ignore Ctrl-C, and so would a child of a test run that was started as one.
    listens = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen([*COMMAND, *arguments], **pipes, text=True, env=ENVIRONMENT, preexec_fn=listens) as process:
        _wait_for_rollouts(process, run / "metrics.jsonl")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    (line,) = err.splitlines()
    assert line.startswith("interrupted; go on with: mgrpo ")
    config, store = RunFolder(run).open()
    done = store.committed()
    store.close()
    assert 0 < done < (total := sum(stage.steps * stage.groups_per_step for stage in config.stages))
    result = mgrpo(*shlex.split(line.partition(": ")[2])[1:])
    assert result.code == 0, result
    _, store = RunFolder(run).open()
    assert store.committed() == total
    store.close()


def _wait_for_rollouts(process: subprocess.Popen[str], metrics: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.is_file() and '"reinforce"' in metrics.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"no rollouts: {process.communicate() if process.poll() is not None else 'too slow'}")


def test_an_error_in_a_loop_arrives_as_it_is(tmp_path: Path) -> None:
    """A bug keeps its own traceback: neither one line without it nor a group of exceptions around it."""
    (tmp_path / "broken_reward.py").write_text("def worth(*_):\n    raise ZeroDivisionError('in my reward')\n")
    arguments = ["train", str(SMOKE), "--run", "run", "--set", "reward=broken_reward:worth"]
    result = subprocess.run(
        [*COMMAND, *arguments], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "ZeroDivisionError: in my reward"
    assert "ExceptionGroup" not in result.stderr


# ---------------------------------------------------------------- plan, evaluate, ask


def test_plan_reads_the_recipe_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = mgrpo("plan", SMOKE, "--set", "agents.planner.num_generations=5")
    assert result.code == 0 and "K = 5" in result.out and "searcher" in result.out
    assert not list(tmp_path.iterdir())


def test_evaluate_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "scores.json"
    result = mgrpo("evaluate", smoke_run(), "--questions", "3", "--k", "2", "--split", "dev", "--json", file)
    assert result.code == 0 and "questions answered right" in result.out
    scores = json.loads(file.read_text())
    assert (scores["questions"], scores["k"], scores["split"]) == (3, 2, "dev")
    assert (scores["metrics"]["groups"], scores["metrics"]["rollouts"]) == (3, 6)


def test_the_table_names_temperature_tools_and_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def words(*options: str) -> str:
        return " ".join(mgrpo("evaluate", smoke_run(), "--questions", "1", *options).out.split())

    assert "temperature 1 (planner), 1 (searcher)" in words()
    assert "temperature 0.5, no tools" in words("--temperature", "0.5", "--closed-book")

    async def half_failed(*_: object, **__: object) -> Evaluation:
        group = group_of(rollout(0, 1), failed(1, "EngineTimeout"))
        return Evaluation((group,), {}, rollout_metrics([group], {}))

    monkeypatch.setattr("mgrpo.evaluate.evaluate", half_failed)
    table = words()
    assert "attempts that failed by infrastructure │ 1 " in table and "failures: EngineTimeout │ 1 " in table


def test_evaluate_without_tools_never_delegates(tmp_path: Path) -> None:
    file = tmp_path / "scores.json"
    assert mgrpo("evaluate", smoke_run(), "--closed-book", "--temperature", "0", "--json", file).code == 0
    assert json.loads(file.read_text())["metrics"]["calls_per_rollout"] == 0


def test_the_same_evaluation_gives_the_same_numbers(tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        assert mgrpo("evaluate", smoke_run(), "--json", file).code == 0
    assert files[0].read_text() == files[1].read_text()


def test_ask_shows_the_tree_of_the_questions_own_answer() -> None:
    result = mgrpo("ask", smoke_run(), "--task", "1")
    assert result.code == 0 and "planner/0" in result.out and "gold:" in result.out


def test_ask_takes_a_question_of_that_world() -> None:
    line = refused("ask", smoke_run(), "What is the capital of Atlantis?")
    assert "no word for Atlantis; ask for instance: " in line
    examples = re.findall('"([^"]+)"', line)
    assert len(examples) == 3
    result = mgrpo("ask", smoke_run(), examples[0])
    assert result.code == 0 and examples[0] in result.out.replace("\n", " ")


@pytest.mark.parametrize("question", ["capital", "What is the height of the capital of ?", ""])
def test_ask_refuses_what_the_world_cannot_answer(question: str) -> None:
    assert "ask for instance: " in refused("ask", smoke_run(), question)


def test_ask_refuses_to_compare_names() -> None:
    for question in ("What is the larger capital of {0} and {1} ?", "Which neighbour of {0} has the largest capital ?"):
        assert "no page of the web of task" in refused("ask", smoke_run(), question.format(*countries()))


def countries() -> list[str]:
    """Two countries of the smoke run's first test world."""
    from mgrpo.team import Team

    source = Team.load(smoke_run()).questions()
    pages = source.corpus(source.task(0)).pages.values()  # type: ignore[union-attr]
    return [page.title for page in pages if " : country ." in page.text][:2]


# ---------------------------------------------------------------- from Python


def test_a_trained_team_answers_from_python() -> None:
    from mgrpo.errors import DataError
    from mgrpo.team import Team

    team = Team.load(smoke_run())
    question = team.questions().task(0).question
    assert team.ask(question).root.task == question
    with pytest.raises(DataError, match="no word for Atlantis; ask for instance"):
        team.ask("What is the capital of Atlantis?")
    with pytest.raises(DataError, match="no version 9 of planner; kept: 0, 1, 2"):
        Team.load(smoke_run(), version=9)


def test_a_notebook_with_a_running_loop_can_train_and_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mgrpo.config import load
    from mgrpo.team import Team
    from mgrpo.train import train

    async def cell() -> str:
        config = load(SMOKE, ["stages.0.steps=2", "stages.1.steps=1", "evaluation.every=0"])
        train(config)
        team = Team.load("runs/smoke")
        return team.ask(team.questions().task(0).question).root.task

    monkeypatch.chdir(tmp_path)
    assert asyncio.run(cell()).startswith("What is")
