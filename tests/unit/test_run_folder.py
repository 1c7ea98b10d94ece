from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import tiny_model
from tiny_recipe import REINFORCE, table, tiny

from mgrpo.config import dump, load, resolve
from mgrpo.errors import DataError, RunFolderError
from mgrpo.run import RunFolder

CONFIG = tiny()


def begin(path: Path, config=CONFIG, resume: bool = False) -> None:  # type: ignore[no-untyped-def]
    RunFolder(path).begin(config, resume).close()


def test_a_new_run_has_its_resolved_recipe_and_a_store(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    begin(path)
    assert load(path / "config.toml") == CONFIG
    config, store = RunFolder(path).open()
    assert config == CONFIG and store.committed() == 0 and store.run.seed == CONFIG.seed
    store.close()


def test_a_used_folder_needs_resume(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(RunFolderError, match=f"{tmp_path} holds a run already; add --resume"):
        begin(tmp_path)
    begin(tmp_path, resume=True)


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunFolderError, match=f"{tmp_path} is not empty and holds no run"):
        begin(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_there_must_be_a_run_to_resume_or_open(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=f"{tmp_path}: no run to resume there"):
        begin(tmp_path, resume=True)
    with pytest.raises(RunFolderError, match=f"{tmp_path / 'x'}: no run there"):
        RunFolder(tmp_path / "x").open()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("moment", ["before the recipe", "before the store"])
def test_a_run_killed_at_its_very_beginning_can_go_on(tmp_path: Path, moment: str) -> None:
    if moment == "before the recipe":
        (tmp_path / ".config.toml.tmp").write_text("name = ")
        begin(tmp_path)
    else:
        (tmp_path / "config.toml").write_text(dump(CONFIG))
        begin(tmp_path, resume=True)
    assert sorted(path.name for path in tmp_path.iterdir() if "store" not in path.name) == [".lock", "config.toml"]
    RunFolder(tmp_path).open()[1].close()


def test_resume_refuses_another_recipe_and_names_what_changed(tmp_path: Path) -> None:
    begin(tmp_path)
    for changed, key in (
        (tiny(seed=1), "seed"),
        (tiny(stages=[REINFORCE]), "stages"),
        (tiny(learner={"learning_rate": 2e-3}), "learner"),
    ):
        with pytest.raises(RunFolderError, match=f"{tmp_path / 'config.toml'}: the recipe differs .*{key}"):
            begin(tmp_path, changed, resume=True)
    assert load(tmp_path / "config.toml") == CONFIG


def test_one_process_at_a_time_trains_a_run(tmp_path: Path) -> None:
    held = RunFolder(tmp_path).begin(CONFIG, resume=False)
    code = "from mgrpo.config import load\nfrom mgrpo.run import RunFolder\nfrom pathlib import Path\nimport sys\n"
    code += "run = RunFolder(Path(sys.argv[1]))\nrun.begin(load(run.config_file), resume=True)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    other = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert f"RunFolderError: {tmp_path}: the run is in use by another process" in other.stderr.splitlines()[-1]
    with pytest.raises(RunFolderError, match="in use by another process"):
        begin(tmp_path, resume=True)
    RunFolder(tmp_path).open()[1].close()  # reading is free
    held.close()
    assert subprocess.run(command, timeout=120).returncode == 0


@pytest.mark.parametrize("place", ["a_file", "a_file/below"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_place_that_can_be_no_folder_is_named(tmp_path: Path, place: str, resume: bool) -> None:
    (tmp_path / "a_file").write_text("mine")
    with pytest.raises(RunFolderError, match=f"{tmp_path / place}: "):
        begin(tmp_path / place, resume=resume)
    with pytest.raises(RunFolderError, match=f"{tmp_path / place}: "):
        RunFolder(tmp_path / place).open()
    assert (tmp_path / "a_file").read_text() == "mine"


def test_the_number_of_threads_is_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = CONFIG.model_copy(update={"threads": None})
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    begin(tmp_path, free)
    assert load(tmp_path / "config.toml").threads == 3
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    begin(tmp_path, free, resume=True)  # on another machine
    assert load(tmp_path / "config.toml").threads == 3
    with pytest.raises(RunFolderError, match="the recipe differs from the run's: threads was 3, is 1"):
        begin(tmp_path, CONFIG, resume=True)


def test_whoever_builds_a_team_sets_the_threads(tmp_path: Path) -> None:
    import torch

    from mgrpo.team import Team

    before = torch.get_num_threads()
    try:
        Team(CONFIG.model_copy(update={"threads": 2}), RunFolder(tmp_path).models(CONFIG))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_trackers_may_change_on_resume(tmp_path: Path) -> None:
    begin(tmp_path)
    begin(tmp_path, tiny(trackers=[{"type": "tensorboard"}]), resume=True)


def test_tiny_models_are_made_once_and_differ_by_agent(tmp_path: Path) -> None:
    folders = RunFolder(tmp_path).models(CONFIG)
    weights = {name: (folder / "model.safetensors").read_bytes() for name, folder in folders.items()}
    assert weights["planner"] != weights["searcher"]
    (folders["planner"] / "mark").touch()
    (tmp_path / "models" / ".searcher.tmp").mkdir()  # of a run that was killed
    again = RunFolder(tmp_path).models(CONFIG)
    assert again == folders and (folders["planner"] / "mark").exists()


def test_a_models_half_written_folder_is_written_again(tmp_path: Path) -> None:
    half = tmp_path / "models" / ".planner.tmp"
    half.mkdir(parents=True)
    (half / "config.json").write_text("{")
    folder = RunFolder(tmp_path).models(CONFIG)["planner"]
    assert not half.exists() and (folder / "tokenizer.json").is_file()


def test_a_model_folder_is_used_where_it_lies_or_named(tmp_path: Path) -> None:
    lying = tmp_path / "lying"
    tiny_model().save_pretrained(lying)
    agents = {name: agent | {"model": str(lying)} for name, agent in table()["agents"].items()}
    assert RunFolder(tmp_path / "run").models(resolve(table(agents=agents))) == dict.fromkeys(agents, lying)
    agents["searcher"]["model"] = "no/such"
    with pytest.raises(DataError, match="agents.searcher.model: no folder 'no/such'"):
        RunFolder(tmp_path / "run").models(resolve(table(agents=agents)))
