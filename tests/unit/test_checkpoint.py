"""What a policy writes is what it reads, weights and optimiser state, bit for bit; in files that can run nothing."""

from __future__ import annotations

import ast
import json
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_model
from tiny_rows import SFT_LOSS, batches, random_rows

import mgrpo
from mgrpo.errors import CheckpointError
from mgrpo.policy import checkpoint
from mgrpo.policy.update import Policy, Schedule

PLANS = {"adamw": Schedule(1e-3, 10, adam_betas=(0.9, 0.95)), "muon": Schedule(1e-3, 10, optimizer="muon")}


def trained(steps: int = 1, plan: Schedule = PLANS["adamw"]) -> Policy:
    policy = Policy(tiny_model())
    policy.begin(plan)
    for step in range(steps):
        policy.update(batches(random_rows()), SFT_LOSS, step)
    return policy


def same_weights(one: Policy, other: Policy) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def same(one: Any, other: Any) -> bool:
    """Equal values of equal types, tensors bit for bit and of one dtype."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.fixture(params=PLANS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Policy, Schedule]:
    plan = PLANS[request.param]
    policy = trained(2, plan)
    checkpoint.save(policy, tmp_path, "rl")
    return tmp_path, policy, plan


def test_what_is_saved_is_loaded_and_goes_on_alike(saved: tuple[Path, Policy, Schedule]) -> None:
    folder, policy, plan = saved
    loaded = trained(0, plan)
    checkpoint.load(loaded, folder, "rl")
    assert same_weights(loaded, policy) and same(loaded.state(), policy.state())
    for one in (policy, loaded):
        one.update(batches(random_rows()), SFT_LOSS, 2)
    assert same_weights(loaded, policy)


def test_an_optimiser_state_belongs_to_its_stage(saved: tuple[Path, Policy, Schedule]) -> None:
    folder, policy, plan = saved
    loaded = trained(0, plan)
    checkpoint.load(loaded, folder, "another")
    assert same_weights(loaded, policy)
    assert not any(o.state for o in loaded.optimizers)


def test_it_is_a_model_folder(saved: tuple[Path, Policy, Schedule]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(saved[0], local_files_only=True)
    assert same_weights(Policy(model), saved[1])


@pytest.mark.parametrize("name", [checkpoint.STATE, checkpoint.TENSORS])
@pytest.mark.parametrize("damage", ["empty", "gone"])
def test_an_unreadable_optimiser_state_is_named(saved: tuple[Path, Policy, Schedule], name: str, damage: str) -> None:
    folder, _, plan = saved
    (folder / name).unlink() if damage == "gone" else (folder / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match="learner.json: no optimiser state"):
        checkpoint.load(trained(0, plan), folder, "rl")


def test_every_file_is_json_or_safetensors(saved: tuple[Path, Policy, Schedule]) -> None:
    for path in saved[0].iterdir():
        json.loads(path.read_text()) if path.suffix == ".json" else load_file(path)


def test_a_full_disk_is_an_error_of_the_disk(tmp_path: Path) -> None:
    """Whoever writes the folder tries again when there is space."""
    policy, (soft, hard) = trained(), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}'"):
            checkpoint.save(policy, tmp_path, "rl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


# ---------------------------------------------------------------- nothing in the package runs what it reads

SERIALISERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
RUNNING = {"eval", "exec", "compile", "os.system", "yaml.load", "yaml.unsafe_load", "torch.load", "torch.save"}


def running(source: str) -> Iterator[str]:
    """What a program does that can run data: unpickling, evaluation, a model folder's own code, a shell."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in SERIALISERS)
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {node.module.split(".")[0], *(f"{node.module}.{alias.name}" for alias in node.names)}
            yield from whole & (SERIALISERS | RUNNING)
        elif isinstance(node, ast.Call):
            if (function := ast.unparse(node.func)) in RUNNING:
                yield function
            for keyword in node.keywords:
                asked = not isinstance(keyword.value, ast.Constant) or keyword.value.value is not False
                if keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and asked:
                    yield f"{function}({keyword.arg})"


def test_nothing_in_the_package_runs_what_it_reads() -> None:
    """R-65, R-67: JSON and safetensors only."""
    sources = {path: path.read_text(encoding="utf-8") for path in Path(mgrpo.__file__).parent.rglob("*.py")}
    found = {str(path): what for path, source in sources.items() if (what := list(running(source)))}
    assert len(sources) > 50 and not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle as p",
        "from torch import load",
        "import torch\ntorch.load('x', weights_only=True)",
        "from dill import loads",
        "def f(x): return eval(x)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=wanted)",
        "np.load(x, allow_pickle=True)",
    ],
)
def test_what_would_run_data_is_seen(source: str) -> None:
    assert list(running(source))
    assert not list(running("model.eval(); re.compile(x); f(trust_remote_code=False)"))
