"""What a user can get wrong with the commands of parts: one line says what, and nothing that was there is harmed."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from command_line import contents, mgrpo, refused
from parts_running import Parts, assert_ledger, assert_same_run
from tiny_recipe import REINFORCE, table

from mgrpo.config import Config, dump, load, resolve
from mgrpo.run import RunFolder

STAGE = REINFORCE | {"steps": 3, "num_generations": 2}
SHORT = {"questions": 1, "tasks": {"split": "test"}, "examples": 0, "closed_book": False}
BRIEF = {"outage_timeout_s": 0.5, "store_timeout_s": 0.5}
PATIENT = {"outage_timeout_s": 120.0, "store_timeout_s": 120.0}


def recipe(**options: Any) -> Config:
    made = table(stages=[STAGE], evaluation=SHORT, reward="tiny_recipe:token_reward", launch={"tool_server": False})
    for name, own in options.pop("agents", {}).items():
        made["agents"][name] = {k: v for k, v in (made["agents"][name] | own).items() if v is not None}
    return resolve(made | options)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def written(folder: Path, config: Config) -> Path:
    path = folder / "recipe.toml"
    path.write_text(dump(config), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Parts set one for SIGTERM; this process is none."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def without_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MGRPO_TOKEN", "MGRPO_STORE"):
        monkeypatch.delenv(variable, raising=False)


# ---------------------------------------------------------------- agents


@pytest.mark.parametrize("command", ["serve", "learn"])
def test_an_unknown_agent_is_named_with_the_nearest_known_one(command: str, run: Path, tmp_path: Path) -> None:
    line = refused(command, "plannr", written(tmp_path, recipe()), "--run", run)
    assert line == f"error: {command} plannr: the recipe has no such agent (did you mean 'planner'?)"
    assert not run.exists()


@pytest.mark.parametrize("command", ["serve", "learn"])
def test_an_agent_that_shares_weights_names_their_owner(command: str, run: Path, tmp_path: Path) -> None:
    config = recipe(agents={"searcher": {"model": None, "share_weights_with": "planner"}})
    line = refused(command, "searcher", written(tmp_path, config), "--run", run)
    assert line == f"error: {command} searcher: it shares the weights of 'planner'; name that one"


def test_weights_that_never_move_need_no_learner(run: Path, tmp_path: Path) -> None:
    path = written(tmp_path, recipe(agents={"searcher": {"trainable": False}}))
    line = refused("learn", "searcher", path, "--run", run)
    assert line == "error: learn searcher: its weights move in no stage; `mgrpo serve searcher` is all that it needs"


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize("command", [["serve", "planner"], ["tools"]])
def test_other_machines_may_not_ask_without_a_token(
    command: list[str], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (*command, written(tmp_path, recipe()), "--run", run, "--host", "0.0.0.0")
    line = refused(*arguments)
    assert "0.0.0.0 can be reached from other machines: export MGRPO_TOKEN" in line
    monkeypatch.setenv("MGRPO_TOKEN", "short")
    line = refused(*arguments)
    assert "MGRPO_TOKEN is shorter than 16 characters" in line and "short " not in line.replace("shorter", "")


@pytest.mark.parametrize("command", [["serve", "planner"], ["tools"]])
def test_a_port_that_is_taken_is_named(command: list[str], run: Path, tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        line = refused(*command, written(tmp_path, recipe()), "--run", run, "--port", str(port))
    assert line.startswith(f"error: cannot listen on 127.0.0.1:{port} (Address already in use)")


def test_a_host_that_is_not_this_machine_s_is_named(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGRPO_TOKEN", "0123456789abcdef")
    line = refused("tools", written(tmp_path, recipe()), "--run", run, "--host", "203.0.113.9")
    assert line.startswith("error: cannot listen on 203.0.113.9:0 (")


PASSWORD = "hunter2-of-the-test"


@pytest.mark.parametrize("command", [["serve", "planner"], ["tools"], ["collect"], ["learn", "planner"], ["launch"]])
def test_a_password_in_a_url_is_refused_and_written_nowhere(command: list[str], run: Path, tmp_path: Path) -> None:
    path = written(tmp_path, recipe())
    line = refused(*command, path, "--run", run, "--store", f"postgresql://me:{PASSWORD}@db.example/run")
    assert line.startswith("error: store: a password does not belong there; give it by PGPASSWORD")
    assert PASSWORD not in line and not run.exists()


def test_a_password_in_the_place_of_weights_is_refused_too(run: Path, tmp_path: Path) -> None:
    path = written(tmp_path, recipe())
    line = refused("learn", "planner", path, "--run", run, "--weights", f"sftp://me:{PASSWORD}@files.example/w")
    assert "password" in line and PASSWORD not in line and not run.exists()


def test_a_name_that_is_no_file_s_is_refused(run: Path, tmp_path: Path) -> None:
    line = refused("collect", written(tmp_path, recipe()), "--run", run, "--name", "../other")
    assert line.startswith("error: --name ../other: letters, digits")


# ---------------------------------------------------------------- recipes and folders


def test_a_part_with_another_recipe_than_the_store_s_is_refused_and_the_right_one_may_join(tmp_path: Path) -> None:
    config, one, other = recipe(**BRIEF), tmp_path / "one", tmp_path / "other"
    RunFolder(one).join(config).close()
    before = contents(one)
    store = ("--store", f"sqlite:///{one / 'store.db'}")
    wrong = written(tmp_path, recipe(**BRIEF, learner={"learning_rate": 2e-3}))
    differs = "learner.learning_rate was 0.001, is 0.002"
    line = refused("learn", "planner", wrong, "--run", other, *store)
    assert line == f"error: {other}: the recipe differs from that of the store's run: {differs}"
    line = refused("learn", "planner", wrong, "--run", one)
    assert line.startswith(f"error: {one / 'config.toml'}: the recipe differs from the run's: {differs}; resume with")
    line = refused("collect", written(tmp_path, recipe(**BRIEF, seed=1)), "--run", other, *store)
    assert "belongs to a run with seed 0, not 1" in line
    assert contents(one) == before
    result = mgrpo("collect", written(tmp_path, config), "--run", other, *store)  # it waits for engines
    assert result.code == 1 and "no server is alive" in result.err


def test_a_folder_keeps_the_places_that_its_first_part_was_told(tmp_path: Path) -> None:
    path, run = written(tmp_path, recipe(**BRIEF)), tmp_path / "run"
    store, place = f"sqlite:///{tmp_path / 'elsewhere.db'}", str(tmp_path / "place")
    for options in (("--store", store, "--weights", place), ()):
        assert mgrpo("collect", path, "--run", run, *options).code == 1
        kept = load(run / "config.toml")
        assert (kept.store, kept.weights) == (store, place) and not (run / "store.db").exists()
    line = refused("train", run)
    assert line == f"error: {run} holds a run already; add --resume to go on, or name another folder"


def test_a_run_that_exists_is_gone_on_with_only_where_that_is_asked_for(run: Path, tmp_path: Path) -> None:
    path = written(tmp_path, recipe())
    line = refused("launch", path, "--run", run, "--resume")
    assert line == f"error: {run}: no run to resume there (no config.toml)"
    RunFolder(run).join(recipe()).close()
    before = contents(run)
    line = refused("launch", path, "--run", run)
    assert line == f"error: {run} holds a run already; add --resume to go on, or name another folder"
    assert contents(run) == before


def test_parts_that_start_at_once_in_a_new_folder_all_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one begins the run between any two looks at the folder."""
    config, folder, looks = recipe(), RunFolder(tmp_path / "run"), Path.exists

    def begun_meanwhile(path: Path) -> bool:
        found = looks(path)
        monkeypatch.setattr(Path, "exists", looks)
        if path.is_relative_to(folder.path):
            folder.join(config).close()
        return found

    monkeypatch.setattr(Path, "exists", begun_meanwhile)
    folder.join(config).close()
    line = refused("launch", written(tmp_path, config), "--run", folder.path)
    assert "holds a run already" in line


def test_a_part_that_another_recipe_s_overtook_leaves_its_folder_alone(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = RunFolder._lock

    def overtaken(folder: RunFolder, alone: bool) -> Any:
        monkeypatch.setattr(RunFolder, "_lock", lock)
        folder.join(recipe()).close()
        return lock(folder, alone)

    monkeypatch.setattr(RunFolder, "_lock", overtaken)
    line = refused("collect", written(tmp_path, recipe(seed=1)), "--run", run)
    assert "the recipe differs from the run's: seed was 0, is 1" in line
    assert load(run / "config.toml").seed == 0


EVERY_PART = [["serve", "planner"], ["collect"], ["learn", "planner"], ["launch"]]


@pytest.mark.parametrize("alone", [True, False])
def test_one_process_and_parts_keep_out_of_each_other_s_way(alone: bool, run: Path, tmp_path: Path) -> None:
    config = recipe()
    path = written(tmp_path, config)
    hold = RunFolder(run).begin(config, resume=False) if alone else RunFolder(run).join(config)
    commands = EVERY_PART if alone else [["train"]]
    with closing(hold):
        before = contents(run)
        for command in commands:
            resumed = ["--resume"] if command[0] in ("train", "launch") else []
            line = refused(*command, path, "--run", run, *resumed)
            assert f"{run}: the run is in use by another process; wait for it, or stop it" in line
        assert contents(run) == before


# ---------------------------------------------------------------- waits that nobody ends


def test_a_second_learner_waits_for_the_first_one_s_lease_and_says_so(run: Path, tmp_path: Path) -> None:
    config = recipe(**BRIEF)
    with closing(RunFolder(run).join(config)) as hold:
        hold.store.lease("learn/planner", "learn-planner", 60.0)
        result = mgrpo("learn", "planner", written(tmp_path, config), "--run", run)
        assert result.code == 1
        said = "error: StoreTimeout: waited 0.5 s for another learner of 'planner' to give up its lease"
        assert result.err.splitlines() == [said]
        assert hold.store.latest("planner") is None and hold.store.parts() == []


def test_a_collector_without_engines_says_whom_it_waited_for(run: Path, tmp_path: Path) -> None:
    result = mgrpo("collect", written(tmp_path, recipe(**BRIEF)), "--run", run)
    assert result.code == 1
    said = "error: EngineTimeout: no server of 'planner' had version 0 within 0.5 s: no server is alive"
    assert result.err.splitlines()[-1] == said


def test_a_collector_without_a_tool_server_says_so(run: Path, tmp_path: Path) -> None:
    config = recipe(**BRIEF, launch={"tool_server": True})
    result = mgrpo("collect", written(tmp_path, config), "--run", run)
    assert result.code == 1
    assert result.err.splitlines()[-1].startswith("error: StoreTimeout: waited 0.5 s for a tool server")


# ---------------------------------------------------------------- two of one


def test_a_second_learner_takes_over_when_the_first_one_leaves(tmp_path: Path) -> None:
    config = recipe(**PATIENT)
    with Parts(tmp_path / "parts", config) as parts, Parts(tmp_path / "alone", config) as alone:
        running = parts.all("collect")
        parts.until(lambda: parts.store.latest("planner"), "the planner's first weights")
        second = parts.start("learn", "planner", name="learn-planner-again")
        parts.until(lambda: parts.part("learn-planner-again"), "the second learner to wait")
        parts.start("collect")
        parts.trained("planner", STAGE["groups_per_step"])
        assert running["learn-planner"].stop() == 130
        parts.complete()
        assert second.code == 0
        assert_ledger(parts.store, config)
        alone.start("train")
        alone.complete()
        assert_same_run(parts.store, alone.store)


def test_two_learners_of_one_name_do_not_train_twice(tmp_path: Path) -> None:
    config = recipe(**PATIENT)
    with Parts(tmp_path, config) as parts:
        first = parts.all("collect")["learn-planner"]
        parts.until(lambda: parts.store.latest("planner"), "the planner's first weights")
        there = parts.until(lambda: parts.part("learn-planner"), "the first learner to be there")
        first.ends = True
        parts.start("learn", "planner")
        parts.until(lambda: (part := parts.part("learn-planner")) and part.instance != there.instance, "the second one")
        parts.start("collect")
        parts.until(lambda: first.code is not None, "the first learner to notice")
        assert first.code == 1 and "learn-planner lost its lease 'learn/planner'" in first.said()
        parts.complete()
        assert_ledger(parts.store, config)
