"""Weights and optimiser state on disk: written under a temporary name, synced, then renamed; checked when read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from mgrpo.engines.model import WEIGHTS, load_weights
from mgrpo.errors import CheckpointError
from mgrpo.policy.update import Policy

STATE = "learner.pt"
MANIFEST = "manifest.json"


def save(policy: Policy, folder: Path, stage: str) -> str:
    """Write a checkpoint folder and return its checksum (sha256 of the weights). An existing one is replaced.

    ``stage`` names the stage whose optimiser state this is.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    policy.model.save_pretrained(temporary, max_shard_size="1000GB")  # one file, one checksum
    torch.save({"stage": stage, **policy.state()}, temporary / STATE)
    sums = {path.name: _sha256(path) for path in sorted(temporary.iterdir())}
    (temporary / MANIFEST).write_text(json.dumps(sums, indent=1))
    for path in temporary.iterdir():
        _sync(path)
    _sync(temporary)
    if folder.exists():  # left by a run that was killed before it published this version
        shutil.rmtree(folder)
    temporary.rename(folder)
    _sync(folder.parent)
    return sums[WEIGHTS]


def verify(folder: Path, checksum: str | None = None) -> None:
    """Raise CheckpointError naming the file that is missing or differs from what was written."""
    try:
        sums = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / MANIFEST}: not readable: {error}") from error
    for name, expected in sums.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; restore it or start a new run folder")
        if _sha256(path) != expected:
            raise CheckpointError(f"{path}: damaged (its sha256 is not the one in {MANIFEST}); restore it")
    if checksum is not None and sums.get(WEIGHTS) != checksum:
        raise CheckpointError(f"{folder / WEIGHTS}: not the weights that the store published; restore them")


def load(policy: Policy, folder: Path, checksum: str, stage: str) -> None:
    """Weights of a checkpoint into ``policy``, and the optimiser state too if it belongs to ``stage``.

    Call ``policy.begin`` with the schedule of ``stage`` first; a checkpoint of an earlier stage leaves it fresh.
    """
    verify(folder, checksum)
    load_weights(policy.model, folder)
    state: dict[str, Any] = torch.load(folder / STATE, weights_only=True)
    if state["stage"] == stage:
        policy.restore(state)


def keep(folder: Path, place: Path) -> None:
    """Copy a version folder to ``place``, where pruning does not reach it; nothing where one is there already."""
    if place.exists():
        return
    temporary = place.with_name(f".{place.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(folder, temporary)
    (temporary / STATE).unlink()  # a reference never learns
    for path in temporary.iterdir():
        _sync(path)
    temporary.rename(place)
    _sync(place.parent)


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` version folders (named v<number>)."""
    versions = sorted(folder.glob("v*"), key=lambda path: int(path.name[1:]))
    for path in versions[:-keep]:
        shutil.rmtree(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
