"""A checkpoint is whole or not there, and says what is damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from tiny_rows import SFT_LOSS, batches, random_rows

from mgrpo.errors import CheckpointError
from mgrpo.policy import checkpoint
from mgrpo.policy.update import Policy, Schedule

PLAN = Schedule(1e-3, 10)


def trained(steps: int = 1) -> Policy:
    policy = Policy(tiny_model())
    policy.begin(PLAN)
    for step in range(steps):
        policy.update(batches(random_rows()), SFT_LOSS, step)
    return policy


def same_weights(one: Policy, other: Policy) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, str, Policy]:
    policy = trained()
    folder = tmp_path / "weights" / "v1"
    return folder, checkpoint.save(policy, folder, "rl"), policy


def test_what_is_saved_is_loaded(saved: tuple[Path, str, Policy]) -> None:
    folder, checksum, policy = saved
    loaded = trained(0)
    checkpoint.load(loaded, folder, checksum, "rl")
    assert same_weights(loaded, policy)
    for one in (policy, loaded):
        one.update(batches(random_rows()), SFT_LOSS, 1)
    assert same_weights(loaded, policy)


def test_an_optimiser_state_belongs_to_its_stage(saved: tuple[Path, str, Policy]) -> None:
    folder, checksum, policy = saved
    loaded = trained(0)
    checkpoint.load(loaded, folder, checksum, "another")
    assert same_weights(loaded, policy)
    assert not any(o.state for o in loaded.optimizers)


def test_it_is_a_model_folder(saved: tuple[Path, str, Policy]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(saved[0], local_files_only=True)
    assert same_weights(Policy(model), saved[2])


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.STATE, "config.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_file_is_named(saved: tuple[Path, str, Policy], name: str, damage: str) -> None:
    folder, checksum, _ = saved
    path = folder / name
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    policy = trained(0)
    untouched = trained(0)
    with pytest.raises(CheckpointError, match=f"{path}: (missing|damaged)"):
        checkpoint.load(policy, folder, checksum, "rl")
    assert same_weights(policy, untouched)


@pytest.mark.parametrize("content", [None, "", "{"])
def test_a_damaged_manifest_is_named(saved: tuple[Path, str, Policy], content: str | None) -> None:
    folder, checksum, _ = saved
    manifest = folder / checkpoint.MANIFEST
    if content is None:
        manifest.unlink()
    else:
        manifest.write_text(content)
    with pytest.raises(CheckpointError, match=f"{manifest}: not readable"):
        checkpoint.verify(folder)


def test_other_weights_than_were_published_are_refused(saved: tuple[Path, str, Policy]) -> None:
    folder, _, _ = saved
    checksum = checkpoint.save(trained(2), folder.with_name("v2"), "rl")
    with pytest.raises(CheckpointError, match="not the weights that the store published"):
        checkpoint.load(trained(0), folder, checksum, "rl")


# ---------------------------------------------------------------- interruptions


class Stopped(BaseException):
    pass


@pytest.mark.parametrize("moment", ["rename", "sync", "sums"])
def test_an_interrupted_save_leaves_the_old_one_usable(
    saved: tuple[Path, str, Policy], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, checksum, policy = saved

    def stop(*_: object) -> None:
        raise Stopped

    with monkeypatch.context() as patch:
        target = {"rename": (Path, "rename"), "sync": (checkpoint, "_sync"), "sums": (checkpoint, "_sha256")}[moment]
        patch.setattr(*target, stop)
        with pytest.raises(Stopped):
            checkpoint.save(trained(2), folder.with_name("v2"), "rl")
    assert not folder.with_name("v2").exists()
    loaded = trained(0)
    checkpoint.load(loaded, folder, checksum, "rl")
    assert same_weights(loaded, policy)
    again = checkpoint.save(trained(2), folder.with_name("v2"), "rl")  # over what the interrupted one left
    checkpoint.verify(folder.with_name("v2"), again)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["v1", "v2"]


def test_a_folder_that_no_publication_named_is_replaced(saved: tuple[Path, str, Policy]) -> None:
    folder, checksum, _ = saved
    (folder / "left over").touch()
    other = checkpoint.save(trained(2), folder, "rl")
    assert other != checksum
    checkpoint.verify(folder, other)
    assert not (folder / "left over").exists()


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, rename = checkpoint._sync, Path.rename
    monkeypatch.setattr(checkpoint, "_sync", lambda path: (events.append(f"sync {path.name}"), sync(path)))
    monkeypatch.setattr(Path, "rename", lambda path, to: (events.append(f"rename {path.name}"), rename(path, to))[1])
    checkpoint.save(trained(0), tmp_path / "v1", "rl")
    renamed = events.index("rename .v1.tmp")
    assert {f"sync {path.name}" for path in (tmp_path / "v1").iterdir()} | {"sync .v1.tmp"} == set(events[:renamed])
    assert events[renamed + 1 :] == [f"sync {tmp_path.name}"]


def test_prune_keeps_the_newest_by_number(tmp_path: Path) -> None:
    for number in (2, 9, 10, 11):
        (tmp_path / f"v{number}").mkdir()
    (tmp_path / ".v12.tmp").mkdir()
    checkpoint.prune(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == [".v12.tmp", "v10", "v11"]
    checkpoint.prune(tmp_path, 5)
    assert sorted(os.listdir(tmp_path)) == [".v12.tmp", "v10", "v11"]
