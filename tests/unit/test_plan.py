"""What `mgrpo plan` says, checked against the parts it speaks of."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from report_samples import config_of, meaning, team

from mgrpo.config import TinyModel, load
from mgrpo.errors import ConfigError, DataError
from mgrpo.report.model_size import folder_size, memory, tiny_size, version_bytes
from mgrpo.report.notation import size
from mgrpo.report.plan import expected_rows, memories, memory_lines, model_sizes, plan_text
from mgrpo.tasks.world import Settings as WorldSettings

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    "tiny",
    [
        TinyModel(type="tiny"),
        TinyModel(type="tiny", hidden_size=48, intermediate_size=80, num_layers=2, num_heads=3),
    ],
)
@pytest.mark.parametrize("format", ["compact", "hermes"])
def test_tiny_parameters_are_those_of_the_real_model(tiny: TinyModel, format: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from mgrpo.agents.formats import Compact, Hermes
    from mgrpo.engines.model import load_model
    from mgrpo.policy.tiny import write_tiny
    from mgrpo.tasks.world import Settings

    controls = {"compact": Compact, "hermes": Hermes}[format]().controls
    write_tiny(tmp_path / "m", tiny, Settings().vocabulary(), controls, seed=0)
    model = load_model(tmp_path / "m")
    changed = {"model": tiny.model_dump(), "format": format}
    size = model_sizes(team(changed))["searcher"]
    assert size.parameters == sum(p.numel() for p in model.parameters())
    inner = {name: p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name}
    assert size.matrices == sum(p.numel() for p in inner.values())
    assert folder_size(tmp_path / "m") == size


def test_optimizer_state_is_that_of_the_real_optimizers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from mgrpo.engines.model import load_model
    from mgrpo.policy.optimizers import make_optimizers
    from mgrpo.policy.tiny import write_tiny

    tiny = TinyModel(type="tiny", hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2)
    write_tiny(tmp_path / "m", tiny, ["a", "b"], ["<call>"], seed=0)
    size = folder_size(tmp_path / "m")
    for name in ("adamw", "muon"):
        model = load_model(tmp_path / "m")
        optimizers = make_optimizers(model, name, 1e-3, (0.9, 0.98), 0.0)
        model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        kept = sum(
            value.numel() * value.element_size()
            for optimizer in optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if value.ndim > 0
        )
        estimate = memory(size, name, 0, 4)  # type: ignore[arg-type]
        assert estimate.optimizer == kept
        assert estimate.weights == estimate.gradients == 4 * size.parameters
        assert version_bytes(size, name) == 4 * size.parameters + kept  # type: ignore[arg-type]


def test_activations_are_about_what_the_backward_pass_keeps(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from mgrpo.engines.model import load_model
    from mgrpo.policy.tiny import write_tiny

    tiny = TinyModel(type="tiny")
    write_tiny(tmp_path / "m", tiny, [f"w{i}" for i in range(800)], ["<call>"], seed=0)
    model = load_model(tmp_path / "m").train()
    weights = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(input_ids=torch.ones(8, 64, dtype=torch.int64), use_cache=False).logits
        torch.log_softmax(logits, -1).sum()
    estimate = memory(folder_size(tmp_path / "m"), "adamw", 8 * 64, 4).activations
    assert 0.5 * estimate < sum(kept.values()) < 1.5 * estimate


def write_folder(folder: Path, shapes: dict[str, list[int]], sharded: bool = False) -> Path:
    folder.mkdir()
    shape = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 10}
    (folder / "config.json").write_text(json.dumps(shape | {"num_key_value_heads": 1, "intermediate_size": 6}))
    files = [f"model-{i}.safetensors" for i in range(len(shapes))] if sharded else ["model.safetensors"] * len(shapes)
    for file in dict.fromkeys(files):
        own = {name: size for name, size, at in zip(shapes, shapes.values(), files, strict=True) if at == file}
        entries = {name: {"dtype": "BF16", "shape": size, "data_offsets": [0, 0]} for name, size in own.items()}
        header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(header)) + header)
    if sharded:
        index = {"weight_map": dict(zip(shapes, files, strict=True))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("sharded", [False, True])
def test_a_folder_is_counted_from_its_headers(tmp_path: Path, sharded: bool) -> None:
    shapes = {"model.embed_tokens.weight": [10, 8], "q.weight": [8, 8], "norm.weight": [8], "lm_head.weight": [10, 8]}
    size = folder_size(write_folder(tmp_path / "m", shapes, sharded))
    assert (size.parameters, size.matrices, size.kv_width) == (80 + 64 + 8 + 80, 64, 4)


def test_folders_that_are_no_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model folder .*nowhere: no config.json there"):
        plan_text(team({"model": str(tmp_path / "nowhere")}))
    whole = write_folder(tmp_path / "m", {"q.weight": [8, 8]})
    (whole / "model.safetensors").rename(whole / "other")
    with pytest.raises(DataError, match=r"model folder .*m: neither model.safetensors nor"):
        folder_size(whole)
    (whole / "model.safetensors").write_bytes(b"\xff" * 7)
    with pytest.raises(DataError, match=r"model folder .*m: model.safetensors is no safetensors file"):
        folder_size(whole)
    (whole / "model.safetensors").write_bytes(struct.pack("<Q", 2**50) + b"{}")
    with pytest.raises(DataError, match="cut off"):
        folder_size(whole)
    (whole / "other").rename(whole / "model.safetensors")
    (whole / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(DataError, match="'num_attention_heads'"):
        folder_size(whole)


class Wordless:
    """A user's tasks that say nothing of their vocabulary."""

    def __init__(self, split: str = "train") -> None:
        self.split = split


def test_a_tiny_model_needs_a_closed_vocabulary() -> None:
    prose = {"search": {"type": "search", "style": "prose"}, "visit": {"type": "visit"}}
    with pytest.raises(ConfigError, match=r"tasks.type: .*no closed vocabulary"):
        plan_text(config_of(tasks={"type": f"{__name__}:Wordless"}))
    with pytest.raises(ConfigError, match="closed vocabulary only with"):
        plan_text(config_of(tasks={"type": "world", "names": "syllables"}, tools=prose))


def test_frozen_agents_only_take_their_engine() -> None:
    own = memories(team({"trainable": False, "engine": {"type": "local", "dtype": "bfloat16"}}))["searcher"]
    size = model_sizes(team())["searcher"]
    assert (own.weights, own.gradients, own.optimizer, own.activations) == (0, 0, 0, 0)
    assert own.total == own.engine == 2 * size.parameters
    elsewhere = memories(team({"trainable": False, "engine": {"type": "scripted", "function": "m:f"}}))["searcher"]
    assert elsewhere.total == 0


# ---------------------------------------------------------------- words and numbers


def test_expected_rows() -> None:
    config = team()
    warmup, rl = config.stages
    assert expected_rows(config, rl, "planner") == 128 and expected_rows(config, warmup, "planner") == 4
    rows = expected_rows(config, rl, "searcher")
    assert rows is not None and 128 < rows < 128 * 6  # one to six parts a question
    assert expected_rows(team({"trainable": False}), rl, "searcher") == 0


@pytest.mark.parametrize("d", [1, 2, 8])
def test_duplicates_are_weights_and_no_rows(d: int) -> None:
    config = team()
    warmup, rl = config.stages
    source = WorldSettings().build(seed=config.seed)
    calls = [int(source.task(i).info["Annotator Metadata"]["Number of steps"]) for i in range(64)]
    resampled = team({"align": "resample", "trajectories_per_rollout": d})
    assert expected_rows(resampled, rl, "searcher") == 128 * sum(min(made, d) for made in calls) / 64
    assert expected_rows(resampled, warmup, "searcher") == expected_rows(config, warmup, "searcher")
    if d == 8:
        assert expected_rows(resampled, rl, "searcher") == expected_rows(config, rl, "searcher")


def test_rows_of_a_step_are_those_that_alignment_leaves() -> None:
    from report_samples import group_of, rewarded, rollout

    from mgrpo.algorithm.alignment import align
    from mgrpo.types import Sample

    group = group_of(*(rollout(index, index) for index in range(6)))
    worth = rewarded(group)
    searchers = [Sample(t, worth[t.id]) for member in group.rollouts for t in member.trajectories[1:]]
    assert len(align(searchers, "resample", 3, seed=0, step=0)) == sum(min(made, 3) for made in range(6))


def test_the_cache_has_the_engines_dtype() -> None:
    halves = team({"engine": {"type": "local", "dtype": "bfloat16"}})
    own = model_sizes(halves)["searcher"]
    per_token = meaning(memory_lines(halves), "engine")
    assert f"searcher {size(2 * 2 * own.layers * own.kv_width)}" in per_token
    assert f"planner {size(2 * 4 * own.layers * own.kv_width)}" in per_token


def test_an_agent_that_is_not_aligned_has_no_d() -> None:
    assert "d = 8, align weight" in plan_text(team())
    unaligned = plan_text(team({"align": "none"}))
    assert "align none" in unaligned and "d = " not in unaligned


def test_the_whole_text(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan_text(team({"trainable": False}), width=100)
    for title in ("Who learns what", "Stages", "Rewards", "Who is compared with whom", "Loss", "Size and memory"):
        assert f"\n{title} ─" in text
    assert "no, frozen" in text and "searcher in" not in text and "601k" in text
    assert all(len(row) <= 100 for row in text.splitlines())
    assert capsys.readouterr().out == ""
    assert tiny_size(TinyModel(type="tiny"), 849).parameters == model_sizes(team())["planner"].parameters


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_planned(recipe: Path) -> None:
    config = load(recipe)
    if any(isinstance(agent.model, str) and not Path(agent.model).is_dir() for agent in config.agents.values()):
        pytest.skip("names a model folder that is not here")
    text = plan_text(config)
    assert config.name in text and all(stage.name in text for stage in config.stages)
