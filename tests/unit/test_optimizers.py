from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model

from mgrpo.errors import ConfigError
from mgrpo.policy.optimizers import Muon, lr_factor, make_optimizers, orthogonalised

OPTIONS = {"learning_rate": 1e-3, "betas": (0.9, 0.98), "weight_decay": 0.1}


@pytest.mark.parametrize("shape", [(32, 32), (24, 96), (96, 24), (8, 200)])
def test_orthogonalised_singular_values_are_near_one(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(3, *shape, generator=generator), full_matrices=False)
    spectrum = torch.linspace(0.05, 1.0, min(shape)) * torch.tensor([1e-4, 1.0, 1e4])[:, None]
    matrices = left @ torch.diag_embed(spectrum) @ right
    values = torch.linalg.svdvals(orthogonalised(matrices))
    assert values.min() >= 0.6 and values.max() <= 1.3


def test_orthogonalised_keeps_the_singular_vectors() -> None:
    matrix = torch.randn(16, 40, generator=torch.Generator().manual_seed(1))
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.mT @ orthogonalised(matrix[None])[0] @ vh.mT
    assert float((inner - inner.diag().diag()).abs().max()) < 1e-3


def test_a_matrix_of_zeros_stays_one() -> None:
    assert torch.equal(orthogonalised(torch.zeros(1, 4, 6)), torch.zeros(1, 4, 6))


@pytest.mark.parametrize("shape", [(48, 16), (16, 48)])
def test_steps_go_where_those_of_torch_go(shape: tuple[int, int]) -> None:
    """torch.optim.Muon orthogonalises in bfloat16: the same directions and lengths up to its rounding."""
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(shape, generator=generator)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    mine = Muon([ours], lr=0.1, momentum=0.95, weight_decay=0.1)
    other = torch.optim.Muon([theirs], lr=0.1, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        before, before_theirs = ours.detach().clone(), theirs.detach().clone()
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        mine.step()
        other.step()
        step, reference = (ours.detach() - before).flatten(), (theirs.detach() - before_theirs).flatten()
        assert float(torch.cosine_similarity(step, reference, dim=0)) > 0.99
        assert float(step.norm() / reference.norm()) == pytest.approx(1.0, abs=0.05)


def test_matrices_of_one_shape_do_not_disturb_each_other() -> None:
    generator = torch.Generator().manual_seed(3)
    start = [torch.randn(8, 8, generator=generator) for _ in range(3)]
    gradients = [torch.randn(8, 8, generator=generator) for _ in range(3)]

    def stepped(indices: list[int]) -> list[torch.Tensor]:
        parameters = [start[i].clone().requires_grad_() for i in indices]
        for parameter, i in zip(parameters, indices, strict=True):
            parameter.grad = gradients[i].clone()
        Muon(parameters, lr=0.1).step()
        return [parameter.detach() for parameter in parameters]

    alone = [stepped([i])[0] for i in range(3)]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(stepped([0, 1, 2]), alone, strict=True))


def test_a_parameter_without_gradient_is_left_alone() -> None:
    parameter = torch.ones(4, 4, requires_grad=True)
    optimizer = Muon([parameter], lr=0.1, weight_decay=0.5)
    optimizer.step()
    assert torch.equal(parameter, torch.ones(4, 4)) and not optimizer.state


# ---------------------------------------------------------------- who holds which parameter


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_trainable_parameter_is_held_once(optimizer: str, kind: str, tied: bool) -> None:
    model = tiny_model(kind, tie_word_embeddings=tied)
    frozen = next(p for name, p in model.named_parameters() if "norm" in name or "ln_" in name)
    frozen.requires_grad_(False)
    optimizers = make_optimizers(model, optimizer, **OPTIONS)
    held = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_muon_holds_the_matrices_inside_the_layers_only(kind: str) -> None:
    model = tiny_model(kind, tie_word_embeddings=False)
    muon, _ = make_optimizers(model, "muon", **OPTIONS)
    names = {id(p): name for name, p in model.named_parameters()}
    held = [names[id(p)] for p in muon.param_groups[0]["params"]]
    assert all("layers." in name or ".h." in name for name in held)
    assert len(held) == (2 * 7 if kind == "qwen3" else 2 * 4)


def test_an_unknown_optimiser_is_named() -> None:
    with pytest.raises(ConfigError, match="learner.optimizer: unknown optimiser 'sgd'; known: adamw, muon"):
        make_optimizers(tiny_model(), "sgd", **OPTIONS)


# ---------------------------------------------------------------- learning rates


def test_warm_up_rises_in_equal_steps_to_the_full_rate() -> None:
    assert [lr_factor("constant", s, 4, 10, 0.0) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("scheduler", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_falling_schedules_go_from_one_to_the_minimum(scheduler: str, warmup: int) -> None:
    factors = [lr_factor(scheduler, step, warmup, 11, 0.1) for step in range(warmup, 11)]
    assert factors[0] == 1.0 and factors[-1] == pytest.approx(0.1)
    assert factors == sorted(factors, reverse=True)
    assert lr_factor(scheduler, 50, warmup, 11, 0.1) == pytest.approx(0.1)  # never below


def test_cosine_is_above_linear_first_and_below_it_later() -> None:
    linear, cosine = ([lr_factor(name, step, 0, 11, 0.0) for step in range(11)] for name in ("linear", "cosine"))
    assert cosine[2] > linear[2] and cosine[5] == pytest.approx(linear[5]) and cosine[8] < linear[8]


def test_schedules_of_one_step_are_defined() -> None:
    assert lr_factor("linear", 0, 0, 1, 0.0) == 1.0
    assert lr_factor("cosine", 0, 5, 1, 0.0) == 0.2
