"""A policy in a folder of plain files: weights as `save_pretrained` writes them, optimiser state beside them.

::

    config.json, *.safetensors     the model
    learner.safetensors            every tensor of the optimisers, named by its place in their state
    learner.json                   {"stage": the stage whose optimiser it is, "state": the rest, see `plain`}

No pickle: nothing in a checkpoint can run. `mgrpo.store.weights` puts such a folder where others find it:
``weights.write(handle, partial(checkpoint.save, policy, stage=stage))``.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mgrpo.engines.model import load_weights
from mgrpo.errors import CheckpointError
from mgrpo.policy.update import Policy

TENSORS = "learner.safetensors"
STATE = "learner.json"


def save(policy: Policy, folder: Path, stage: str) -> None:
    """Write ``policy`` into the empty ``folder``. ``stage`` names the stage whose optimiser state this is.

    Raises OSError where the disk is full or does not take it.
    """
    tensors: dict[str, Tensor] = {}
    state = {"stage": stage, "state": plain(policy.state(), "", tensors)}
    try:
        policy.model.save_pretrained(folder, max_shard_size="1000GB")
        save_file(tensors, folder / TENSORS)
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(folder)) from error
    (folder / STATE).write_text(json.dumps(state, allow_nan=False), encoding="utf-8")


def load(policy: Policy, folder: Path, stage: str) -> None:
    """Weights of a verified checkpoint into ``policy``, and the optimiser state too if it belongs to ``stage``.

    Call ``policy.begin`` with the schedule of ``stage`` first; a checkpoint of an earlier stage leaves it fresh.
    Raises CheckpointError naming what does not fit.
    """
    load_weights(policy.model, folder)
    try:
        saved = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if saved["stage"] == stage:
            policy.restore(whole(saved["state"], load_file(folder / TENSORS)))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{folder / STATE}: no optimiser state: {error!r}; restore the folder") from error


# ---------------------------------------------------------------- optimiser state as JSON and tensors


def plain(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` for JSON: ``None``, ``true``, 1, 0.1, "text" and lists are themselves, the rest says what it is.

    ``{"tensor": place}`` (put into ``tensors``), ``{"tuple": [...]}``, ``{"dict": [[key, value], ...]}`` (keys may be
    numbers) and ``{"float": "inf"}``. ``place`` is where ``value`` stands. Raises TypeError for anything else.
    """
    if isinstance(value, Tensor):
        tensors[place] = value.detach().contiguous()
        return {"tensor": place}
    if isinstance(value, dict):
        if wrong := [key for key in value if type(key) not in (str, int)]:
            raise TypeError(f"optimiser state {place}: {wrong[0]!r} is no name or number")
        return {"dict": [[key, plain(item, f"{place}/{key}", tensors)] for key, item in value.items()]}
    if type(value) in (list, tuple):
        items = [plain(item, f"{place}/{i}", tensors) for i, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if type(value) is float and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"optimiser state {place}: {type(value).__name__} is no plain value")


def whole(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of `plain`. Raises ValueError where no `plain` wrote ``value``."""
    if isinstance(value, list):
        return [whole(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"tensor": str(place)}:
            return tensors[place]
        case {"tuple": list(items)}:
            return tuple(whole(item, tensors) for item in items)
        case {"dict": list(pairs)}:
            return {key: whole(item, tensors) for key, item in pairs}
        case {"float": str(text)}:
            return float(text)
    raise ValueError(f"{value!r} is no value of an optimiser's state")
