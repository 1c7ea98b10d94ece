"""A trained agent as a plain Hugging Face folder, which transformers, vLLM and others load without this package."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from mgrpo.errors import DataError, RunFolderError
from mgrpo.policy.checkpoint import TENSORS

# What `save_pretrained` of a model writes; a checkpoint's own files (manifest, optimiser) stay behind.
_MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json")


def export(checkpoint: Path, tokenizer: Any, target: Path) -> None:
    """Write weights, config, tokenizer and chat template to ``target``, complete or not at all.

    ``checkpoint`` is a verified folder. Raises RunFolderError where ``target`` is a file or not empty, DataError where
    it cannot be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunFolderError(f"{target} is not an empty folder; name another one")
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for pattern in _MODEL_FILES:
            for path in checkpoint.glob(pattern):
                if path.name != TENSORS:
                    shutil.copy2(path, temporary)
        tokenizer.save_pretrained(temporary)
        temporary.replace(target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise DataError(f"{target}: cannot be written: {error.strerror or error}") from error
