"""An exported agent is an ordinary Hugging Face folder with exactly the trained weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from command_line import contents, mgrpo, refused, smoke_run, version_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from mgrpo.engines.model import load_model


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "planner"
    assert mgrpo("export", smoke_run(), "planner", folder).code == 0
    return folder


def newest(agent: str) -> Path:
    return version_folder(smoke_run(), agent)


def test_weights_are_the_trained_ones_bit_for_bit(exported: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    trained = load_model(newest("planner")).state_dict()
    start = load_model(smoke_run() / "models" / "planner").state_dict()
    assert theirs.keys() == trained.keys()
    assert all(torch.equal(theirs[name], trained[name]) for name in trained)
    assert any(not torch.equal(theirs[name], start[name]) for name in start)


def test_tokenizer_and_chat_template_come_along(exported: Path) -> None:
    ours = AutoTokenizer.from_pretrained(smoke_run() / "models" / "planner")
    theirs = AutoTokenizer.from_pretrained(exported)
    chat = [{"role": "user", "content": "What is the capital of Zubora ?"}]
    expected = ours.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)
    assert theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=True) == expected


def test_it_generates(exported: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    prompt = tokenizer("What is the", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] <= prompt["input_ids"].shape[1] + 3


def test_nothing_of_training_is_in_it(exported: Path) -> None:
    assert not {"learner.json", "learner.safetensors", "manifest.json"} & {path.name for path in exported.iterdir()}


def test_a_named_version(tmp_path: Path) -> None:
    assert mgrpo("export", smoke_run(), "planner", tmp_path / "v", "--version", "1").code == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "v").state_dict()
    ours = load_model(version_folder(smoke_run(), "planner", 1)).state_dict()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_an_empty_folder_is_filled_and_a_used_one_left_alone(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert mgrpo("export", smoke_run(), "planner", tmp_path / "empty").code == 0
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    assert "used is not an empty folder" in refused("export", smoke_run(), "planner", tmp_path / "used")
    assert contents(tmp_path / "used").keys() == {"notes.txt"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("plannr", "x"), "no agent 'plannr' (did you mean 'planner'?)"), (("planner", "x", "--version", "99"), "kept:")],
)
def test_what_is_not_there_is_refused(
    arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refused("export", smoke_run(), *arguments)
    assert not list(tmp_path.iterdir())


def test_damaged_weights_are_not_exported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(smoke_run(), run)
    weights = run / newest("planner").relative_to(smoke_run()) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "model.safetensors: damaged" in refused("export", run, "planner", tmp_path / "out")
    assert not (tmp_path / "out").exists()
