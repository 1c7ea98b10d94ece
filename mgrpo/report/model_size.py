"""How large a model is and what training it takes, without loading it: by formula, or from the headers of its files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from mgrpo.config import TinyModel
from mgrpo.errors import DataError

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
FLOAT32 = 4  # bytes; learners keep weights, gradients and optimiser state in it


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Counts of numbers. ``matrices`` are those of the two-dimensional weights inside the layers, ``kv_width`` is
    key-value heads times head dimension."""

    parameters: int
    matrices: int
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    attention_width: int
    kv_width: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. All but ``engine`` are 0 for an agent that does not learn."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    engine: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.engine


def tiny_size(model: TinyModel, vocabulary: int) -> ModelSize:
    """A Qwen3 model with tied embeddings and as many key-value heads as heads.

    parameters = V h + layers (4 h a + 3 h i + 2 h + 2 a / heads) + h, where a = heads * (h // heads).
    """
    hidden, head = model.hidden_size, model.hidden_size // model.num_heads
    width = model.num_heads * head
    matrices = model.num_layers * (4 * hidden * width + 3 * hidden * model.intermediate_size)
    norms = model.num_layers * (2 * hidden + 2 * head) + hidden
    return ModelSize(
        vocabulary * hidden + matrices + norms,
        matrices,
        vocabulary,
        hidden,
        model.intermediate_size,
        model.num_layers,
        width,
        width,
    )


def folder_size(folder: str | Path) -> ModelSize:
    """From config.json and the headers of the safetensors files. Raises DataError that names the folder."""
    folder = Path(folder)
    config = _json(folder, "config.json")
    shapes = dict(_shapes(folder))
    inner = (shape for name, shape in shapes.items() if not any(end in name for end in ("embed", "lm_head", "wte")))
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        head = int(config.get("head_dim") or hidden // heads)
        return ModelSize(
            sum(map(prod, shapes.values())),
            sum(prod(shape) for shape in inner if len(shape) == 2),
            int(config["vocab_size"]),
            hidden,
            int(config.get("intermediate_size") or 4 * hidden),
            int(config["num_hidden_layers"]),
            heads * head,
            int(config.get("num_key_value_heads") or heads) * head,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"model folder {folder}: config.json lacks or garbles a size ({error!r})") from error


def memory(
    size: ModelSize,
    optimizer: Literal["adamw", "muon"] | None,
    tokens: int,
    engine_bytes_per_number: int,
    reference: bool = False,
) -> Memory:
    """What one agent takes. ``optimizer`` is None for an agent that does not learn; ``tokens`` is a micro-batch;
    a ``reference`` of a KL term is a second set of weights.

    AdamW keeps two numbers per parameter, Muon one per parameter of a matrix. Activations of a token, kept for the
    backward pass: per layer 6 hidden + 2 attention + 2 key-value + 4 intermediate widths, and 3 vocabularies for the
    logits where every token is a target. The attention matrix is not counted: it is not kept.
    """
    engine = size.parameters * engine_bytes_per_number
    if optimizer is None:
        return Memory(0, 0, 0, 0, engine)
    weights = FLOAT32 * size.parameters
    layer = 6 * size.hidden + 2 * size.attention_width + 2 * size.kv_width + 4 * size.intermediate
    activations = FLOAT32 * tokens * (size.layers * layer + 3 * size.vocabulary)
    return Memory(weights * (2 if reference else 1), weights, optimizer_bytes(size, optimizer), activations, engine)


def optimizer_bytes(size: ModelSize, optimizer: Literal["adamw", "muon"]) -> int:
    by_muon = size.matrices if optimizer == "muon" else 0
    return FLOAT32 * (2 * (size.parameters - by_muon) + by_muon)


def version_bytes(size: ModelSize, optimizer: Literal["adamw", "muon"]) -> int:
    """Disk of one kept version: weights and optimiser state."""
    return FLOAT32 * size.parameters + optimizer_bytes(size, optimizer)


def _shapes(folder: Path) -> Iterator[tuple[str, list[int]]]:
    files = [WEIGHTS]
    if not (folder / WEIGHTS).is_file():
        if not (folder / INDEX).is_file():
            raise DataError(f"model folder {folder}: neither {WEIGHTS} nor {INDEX} there; give a complete model folder")
        files = sorted(set(_json(folder, INDEX).get("weight_map", {}).values()))
    for file in files:
        for name, entry in _header(folder, file).items():
            if name != "__metadata__":
                yield name, entry["shape"]


def _header(folder: Path, name: str) -> Mapping[str, Any]:
    """safetensors: 8 bytes with the header's length, little-endian, then the header as JSON."""
    try:
        with (folder / name).open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > (folder / name).stat().st_size:
                raise ValueError("its header is cut off")
            header: Mapping[str, Any] = json.loads(file.read(length))
            return header
    except (OSError, ValueError, struct.error) as error:
        raise DataError(f"model folder {folder}: {name} is no safetensors file ({error})") from error


def _json(folder: Path, name: str) -> Mapping[str, Any]:
    try:
        value: Mapping[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"model folder {folder}: no {name} there; give a folder written by save_pretrained") from error
    except ValueError as error:
        raise DataError(f"model folder {folder}: {name} is not JSON ({error})") from error
    return value
