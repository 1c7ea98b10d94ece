from __future__ import annotations

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
    assert sorted(path.name for path in tmp_path.iterdir() if "store" not in path.name) == ["config.toml"]
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
