"""A Hugging Face causal language model on disk and in memory, and its logits at chosen positions only.

Shared by the local engine, which samples from it, and the learner, which trains it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgrpo.errors import CheckpointError, DataError

WEIGHTS = "model.safetensors"


def load_model(folder: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """The model in ``folder`` (a plain `save_pretrained` folder). Raises DataError that names the folder.

    Pickled weights and code that lies in the folder are refused: nothing there runs.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise DataError(f"model folder {folder}: no config.json there; give a folder written by save_pretrained")
    if not any(folder.glob("*.safetensors")):
        raise DataError(f"model folder {folder}: no *.safetensors there; write it again with save_pretrained")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"model folder {folder}: {str(error).splitlines()[0]}") from error
    return model.to(device).eval()


def load_weights(model: Any, folder: str | Path) -> None:
    """Copy the weights in ``folder`` into ``model``. Raises CheckpointError that names the file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder) / WEIGHTS
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not readable: {error}") from error
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # a tensor of another shape
        raise CheckpointError(f"{path}: does not fit the model: {str(error).splitlines()[-1].strip()}") from error
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        wrong = [*unexpected, *sorted(set(missing) - tied)]
        raise CheckpointError(f"{path}: does not fit the model, first at {wrong[0]!r}")


def logits_at(model: Any, select: Tensor, **inputs: Any) -> Tensor:
    """Logits [N, V] at the N positions where ``select`` [B, T] is True, in row-major order.

    The other positions never reach the output layer, so logits of a whole batch over the whole vocabulary never exist.
    """

    def keep(_: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (arguments[0][select][None],)

    handle = model.get_output_embeddings().register_forward_pre_hook(keep)
    try:
        logits: Tensor = model(**inputs).logits[0]
    finally:
        handle.remove()
    return logits
