"""Model folders, weights, and logits at chosen positions only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from tiny_tokenizer import CONTROLS, TEXT

from mgrpo.config import TinyModel
from mgrpo.engines.model import WEIGHTS, load_model, load_weights, logits_at
from mgrpo.errors import CheckpointError, DataError
from mgrpo.policy.tiny import write_tiny

GEMMA2 = {"layer_types": ["full_attention"] * 2, "final_logit_softcapping": 2.0}
MODELS: list[tuple[str, dict[str, Any]]] = [("qwen3", {}), ("gpt2", {}), ("gemma2", GEMMA2)]


@pytest.mark.parametrize(("kind", "options"), MODELS, ids=lambda value: value if isinstance(value, str) else "")
def test_logits_at_positions_are_the_full_ones_gradient_too(kind: str, options: dict[str, Any]) -> None:
    model = tiny_model(kind, **options)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 60, (3, 9), generator=generator)
    select = torch.rand(3, 9, generator=generator) < 0.4
    mask = torch.ones_like(ids)
    full = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[select]
    chosen = logits_at(model, select, input_ids=ids, attention_mask=mask, use_cache=False)
    assert chosen.shape == (int(select.sum()), 64)
    assert torch.allclose(chosen, full, atol=1e-6)
    weights = torch.randn(full.shape, generator=generator)
    parameters = list(model.parameters())
    expected = torch.autograd.grad((full * weights).sum(), parameters)
    found = torch.autograd.grad((chosen * weights).sum(), parameters)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_logits_at_leaves_the_model_as_it_was() -> None:
    model, ids = tiny_model(), torch.tensor([[2, 3, 4]])
    select = torch.tensor([[False, True, False]])
    logits_at(model, select, input_ids=ids)
    with pytest.raises(IndexError):
        logits_at(model, select[:, :2], input_ids=ids)
    assert model(input_ids=ids).logits.shape == (1, 3, 64)


# ---------------------------------------------------------------- folders


def test_tiny_models_are_a_pure_function_of_the_seed(tmp_path: Path) -> None:
    plan = TinyModel(type="tiny", hidden_size=32, num_layers=1, num_heads=2)
    state = torch.get_rng_state()
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_tiny(tmp_path / name, plan, TEXT.split(), CONTROLS, seed)
    assert torch.equal(torch.get_rng_state(), state)
    a, b, c = ((tmp_path / name / WEIGHTS).read_bytes() for name in "abc")
    assert a == b != c


def test_a_tiny_model_is_an_ordinary_folder(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tiny(tmp_path, TinyModel(type="tiny", hidden_size=32, num_layers=1), TEXT.split(), CONTROLS, 0)
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), load_model(tmp_path)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "what is Zubora ?"}], tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    assert tokenizer.unk_token_id not in ids and max(ids) < model.config.vocab_size == len(tokenizer)
    assert not model.training
    assert (model.config.pad_token_id, model.config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)


def test_weights_are_copied_into_the_model(tmp_path: Path) -> None:
    source, target = tiny_model(seed=0), tiny_model(seed=1)
    source.save_pretrained(tmp_path)
    load_weights(target, tmp_path)
    for one, other in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_bfloat16_model_takes_float32_weights(tmp_path: Path) -> None:
    source = tiny_model()
    source.save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.bfloat16)
    load_weights(model, tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(next(model.parameters()), next(source.parameters()).to(torch.bfloat16))


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated"])
def test_weights_that_cannot_be_read_are_named(tmp_path: Path, damage: str) -> None:
    model, path = tiny_model(), tmp_path / WEIGHTS
    model.save_pretrained(tmp_path)
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(b"" if damage == "empty" else data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=f"{path}: not readable"):
        load_weights(model, tmp_path)


def test_weights_of_another_model_are_named(tmp_path: Path) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"{tmp_path / WEIGHTS}: does not fit the model, first at "):
        load_weights(tiny_model(), tmp_path)


def test_weights_of_another_size_are_named(tmp_path: Path) -> None:
    tiny_model(vocab_size=60).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"{tmp_path / WEIGHTS}: does not fit the model"):
        load_weights(tiny_model(), tmp_path)


def test_a_damaged_model_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=f"model folder {tmp_path}: "):
        load_model(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(DataError, match=f"model folder {tmp_path}: no config.json there; give a folder"):
        load_model(tmp_path)
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"junk")
    with pytest.raises(DataError, match=f"model folder {tmp_path}: "):
        load_model(tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    """R-67."""
    model = tiny_model()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match=f"^model folder {tmp_path}: no .*safetensors there; write it again with .*"):
        load_model(tmp_path)


def test_code_in_a_model_folder_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R-67. Nor is anyone asked whether it should be."""
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(DataError, match=f"model folder {tmp_path}: .*custom code"):
        load_model(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert "[y/N]" not in capsys.readouterr().out
