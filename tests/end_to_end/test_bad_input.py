"""Whatever a user gets wrong: exit code 2, one line that names the key or the file, and nothing lost or written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import COMMAND, ENVIRONMENT, SMOKE, contents, mgrpo, refused, smoke_run, version_folder
from tiny_models import tiny_model

from mgrpo.config import load
from mgrpo.run import RunFolder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ---------------------------------------------------------------- the recipe

MISTAKES = {
    "top level": ("tols={}", "tols: unknown key (did you mean 'tools'?)"),
    "agent": ("agents.planner.max_turn=3", "agents.planner.max_turn: unknown key (did you mean 'max_turns'?)"),
    "tiny model": ("agents.planner.model.hiden_size=8", "agents.planner.model.hiden_size: unknown key"),
    "plug-in": ("tools.search.kk=3", "tools.search.kk: unknown key (did you mean 'k'?)"),
    "nested plug-in": ("stages.0.tasks.noise.hitt=1", "stages.0.tasks.noise.hitt: unknown key (did you mean 'hit'?)"),
    "learner of a stage": ("stages.1.learner.learning_rat=1e-3", "stages.1.learner.learning_rat: unknown key"),
    "peers' name": ("learner.lr=1e-3", "learner.lr: unknown key; here it is called learning_rate"),
    "unknown agent in --set": ("agents.planer.max_turns=3", "unknown agent 'planer' (did you mean 'planner'?)"),
    "a whole unknown agent": ("agents.planer=3", "--set agents.planer: unknown agent 'planer'"),
    "unknown plug-in": ("tasks.type=wrld", "tasks.type: unknown tasks 'wrld' (did you mean 'world'?)"),
    "unknown engine": ("agents.planner.engine.type=locl", "agents.planner.engine.type: unknown engine 'locl'"),
    "unknown preset": ("preset=mgrpo", "preset: unknown preset 'mgrpo' (did you mean 'm_grpo'?)"),
    "unknown tool": ('agents.planner.tools=["serch"]', "agents.planner.tools: unknown tool or agent 'serch'"),
    "not whole": ("stages.0.steps=1.5", "stages.0.steps: must be a whole number, got 1.5"),
    "not a number": ("learner.learning_rate=fast", "learner.learning_rate: must be a number, got 'fast'"),
    "infinite": ("learner.learning_rate=inf", "learner.learning_rate: must be a finite number"),
    "out of range": ("tools.search.k=0", "tools.search.k: must be greater than or equal to 1, got 0"),
    "not a table": ("agents.searcher=3", "agents.searcher: must be a table, got 3"),
    "no planner": ("agents.planner.role=subagent", "agents: exactly one agent has role = 'planner', here 0"),
    "circular": ('agents.searcher.tools=["searcher"]', "agents.searcher.tools: 'searcher' can reach itself"),
    "circular by two": ('agents.searcher.tools=["planner"]', "agents.planner.tools: 'planner' can reach itself"),
    "inert: sub-agent's key": ("agents.planner.align=weight", "agents.planner.align: only sub-agents have it"),
    "inert: unused tool": ('agents.searcher.tools=["search"]', "tools.visit: no agent has it"),
    "inert: uncalled agent": ('agents.planner.tools=["search"]', "agents.searcher: no agent calls it"),
    "inert: clip of sft": ("stages.0.learner.clip_ratio_low=0.1", "stages.0.learner.clip_ratio_low: has no effect"),
    "no held-out questions": (
        "evaluation.tasks={}",
        "evaluation.tasks: missing; name questions that are not trained on",
    ),
    "loss against rollouts": (
        "stages.1.learner.policy_loss=sft",
        "stages.1.learner.policy_loss: sft is for collect = 'teacher'",
    ),
    "window does not divide": (
        "stages.0.weight_sync_steps=3",
        "stages.0.weight_sync_steps: 3 does not divide steps = 4",
    ),
    "names twice": ("stages.1.name=mechanics", "stages.1.name: 'mechanics' is taken by an earlier stage"),
    "unknown agent in train": ('stages.1.train=["x"]', "stages.1.train: unknown agent 'x'"),
    "reward term": ("agents.planner.reward_weights.x=1", "agents.planner.reward_weights.x: unknown term"),
    "missing term": ("agents.planner.reward_weights={format=1}", "agents.planner.reward_weights.correct: missing"),
    "import path": ("tools.search.type=no_such:Thing", "tools.search.type: cannot import 'no_such:Thing'"),
    "import name": ("reward=json:dumpz", "reward: json holds no 'dumpz' (did you mean 'dump'?)"),
    "not a part": ("tools.search={type='json:JSONDecoder'}", "gives no tool: it lacks name, description, parameters"),
    "no such device": (
        "agents.planner.engine={type='local', device='gpu0'}",
        "agents.planner.engine: device: torch cannot compute on 'gpu0'",
    ),
    "no real device": (
        "agents.planner.engine={type='local', device='meta'}",
        "agents.planner.engine: device: torch cannot compute on 'meta'",
    ),
    "questions trained on": ("evaluation.tasks={split='train'}", "evaluation.tasks: stage 0 trains on these questions"),
    "inert: no comparison": ("stages.1.num_generations=1", "stages.1.num_generations: one rollout has none to be"),
    "model folder": ("agents.planner.model=models/none", "agents.planner.model: no folder 'models/none'"),
    "prompt file": ("agents.planner.prompt=none.md", "agents.planner.prompt: none.md: No such file"),
    "no such place": ("stages.9.steps=1", "--set stages.9.steps: there is no such place in the recipe"),
    "no value": ("stages.1.steps", "--set stages.1.steps: expected KEY=VALUE"),
    "a folder's name": ("name=../x", "name: must match pattern"),
}


@pytest.mark.parametrize(("change", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_the_recipe(change: str, says: str, tmp_path: Path) -> None:
    assert says in refused("train", SMOKE, "--set", change)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "says"),
    [("name = ", "not readable as TOML"), ("", "agents: missing"), (b"\xff\xfe", "not readable as TOML")],
    ids=["bad TOML", "empty", "not text"],
)
def test_a_recipe_that_cannot_be_read(text: str | bytes, says: str, tmp_path: Path) -> None:
    Path("recipe.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    line = refused("train", "recipe.toml")
    assert "recipe.toml: " in line and says in line
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("train", "none.toml"), "none.toml: no such recipe"),
        (("plan", "none.toml"), "none.toml: no such recipe"),
        (("train", "."), "no run there (no config.toml)"),
        (("train", SMOKE, "--resume"), "runs/smoke: no run to resume there"),
        (("train", SMOKE, "--seed", "one"), "Invalid value for '--seed'"),
        (("train", SMOKE, "--sed", "1"), "No such option: --sed"),
        (("train",), "Missing argument 'RECIPE'"),
        (("evaluate", "runs/none"), "runs/none: no run there"),
        (("ask", "runs/none", "?"), "runs/none: no run there"),
        (("export", "runs/none", "planner", "x"), "runs/none: no run there"),
    ],
)
def test_a_mistake_in_the_command(arguments: tuple[str | Path, ...], says: str, tmp_path: Path) -> None:
    assert says in refused(*arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--questions", "0"), "Invalid value for '--questions'"),
        (("--questions", "2.5"), "Invalid value for '--questions'"),
        (("--split", "train"), "--split train: choose test or dev"),
        (("--json", "none/scores.json"), "the folder none does not exist"),
    ],
)
def test_a_mistake_in_an_evaluation(arguments: tuple[str, ...], says: str) -> None:
    assert says in refused("evaluate", smoke_run(), *arguments)


def test_a_real_process_says_the_same(tmp_path: Path) -> None:
    command = [*COMMAND, "train", str(SMOKE), "--set", "sed=1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [f"error: {SMOKE}: sed: unknown key (did you mean 'seed'?)"]


# ---------------------------------------------------------------- models and data


def test_a_model_folder_without_a_tokenizer(tmp_path: Path) -> None:
    shutil.copytree(smoke_run() / "models" / "planner", "model", ignore=shutil.ignore_patterns("token*", "*.jinja"))
    line = refused("train", SMOKE, "--set", "agents.planner.model=model")
    assert "model folder model: no tokenizer (none of tokenizer.json" in line
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("damage", ["cut", "empty", "remove"])
def test_a_model_folder_with_damaged_weights(damage: str, tmp_path: Path) -> None:
    shutil.copytree(smoke_run() / "models" / "planner", "model")
    DAMAGES[damage](Path("model/model.safetensors"))
    assert "model folder model: " in refused("train", SMOKE, "--set", "agents.planner.model=model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_that_the_engine_cannot_decode(tmp_path: Path) -> None:
    shutil.copytree(smoke_run() / "models" / "planner", "model")
    tiny_model("bloom").save_pretrained("model")  # derives positions from the attention mask
    line = refused("train", SMOKE, "--set", "agents.planner.model=model")
    assert "agents.planner.engine: " in line and "cannot decode this model (bloom)" in line
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_tracker_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    line = refused("train", SMOKE, "--set", "trackers=[{type='tensorboard'}]")
    assert "trackers: tensorboard is not installed" in line and "pip install" in line
    assert not list(tmp_path.iterdir())


def test_a_model_folder_whose_vocabulary_lacks_the_formats_tokens(tmp_path: Path) -> None:
    assert mgrpo("export", smoke_run(), "planner", "model").code == 0
    text = Path("model/tokenizer.json").read_text()
    for control in ("<call>", "</call>"):
        text = text.replace(json.dumps(control), json.dumps(control.replace("call", "cull")))
    Path("model/tokenizer.json").write_text(text)
    assert "lacks the control tokens <call> </call>" in refused("train", SMOKE, "--set", "agents.planner.model=model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "tasks.jsonl: holds no tasks"),
        ("{}\n", "tasks.jsonl:1: field 'answer' is missing"),
        ('{"question": "Q ?", "answer": "A"}\n{', "tasks.jsonl:2: bad JSON"),
    ],
    ids=["empty", "no answer", "bad JSON"],
)
def test_a_bad_data_file(text: str, says: str, tmp_path: Path) -> None:
    Path("tasks.jsonl").write_text(text)
    tables = {"stages": "[{name='rl', steps=2, groups_per_step=1}]", "evaluation.every": "0"}
    tables |= {"tasks": "{type='jsonl', path='tasks.jsonl', corpus='pages.jsonl'}", "evaluation.dev_tasks": "{}"}
    tables |= {"evaluation.tasks": "{path='test.jsonl'}"}
    line = refused("train", SMOKE, *(a for key, table in tables.items() for a in ("--set", f"{key}={table}")))
    assert says in line
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.jsonl"]


def test_tasks_without_a_teacher_cannot_demonstrate(tmp_path: Path) -> None:
    Path("tasks.jsonl").write_text('{"question": "Q ?", "answer": "A"}')
    Path("pages.jsonl").write_text('{"url": "p1", "title": "T", "text": "A"}')
    tasks = "stages.0.tasks={type='jsonl', path='tasks.jsonl', corpus='pages.jsonl'}"
    assert "stages.0.collect: jsonl tasks have no scripted teacher" in refused("train", SMOKE, "--set", tasks)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    changes = ("agents.searcher.trainable=false", "agents.searcher.engine={type='scripted', path='none.json'}")
    line = refused("train", SMOKE, *(part for change in changes for part in ("--set", change)))
    assert "agents.searcher.engine: scripted replies none.json: " in line
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- the run folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(smoke_run(), folder)
    return folder


def test_a_used_folder_is_left_alone(run: Path) -> None:
    before = contents(run)
    assert "holds a run already; add --resume to go on" in refused("train", SMOKE, "--run", run)
    assert contents(run) == before


@pytest.mark.parametrize("place", ["notes.txt", "notes.txt/run"])
def test_a_file_is_no_run_folder(place: str, tmp_path: Path) -> None:
    Path("notes.txt").write_text("mine")
    assert f"{place}: cannot be a run folder (Not a directory)" in refused("train", SMOKE, "--run", place)
    assert list(contents(tmp_path)) == ["notes.txt"]


def test_a_run_in_use_is_left_alone(run: Path) -> None:
    before = contents(run)
    held = RunFolder(run).begin(load(run / "config.toml"), resume=True)
    assert "the run is in use by another process" in refused("train", run, "--resume")
    held.close()
    assert contents(run) == before


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    Path("notes").mkdir()
    Path("notes/mine.txt").write_text("mine")
    assert "notes is not empty and holds no run" in refused("train", SMOKE, "--run", "notes")
    assert list(contents(tmp_path / "notes")) == ["mine.txt"]


@pytest.mark.parametrize(
    ("change", "says"),
    [("stages.1.steps=9", "stages.1.steps was 3, is 9"), ("seed=5", "seed was 0, is 5"), ("tools.search.k=5", "tools")],
)
def test_another_recipe_does_not_resume(change: str, says: str, run: Path) -> None:
    before = contents(run)
    line = refused("train", SMOKE, "--run", run, "--resume", "--set", change)
    assert says in line and "config.toml" in line
    assert contents(run) == before


def _newest(run: Path, name: str) -> Path:
    return version_folder(run, "planner") / name


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: dict[str, Callable[[Path], None]] = {"flip": _flip, "cut": _cut, "empty": _empty, "remove": Path.unlink}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "manifest.json"])
def test_a_damaged_checkpoint_is_named(name: str, damage: str, run: Path) -> None:
    file = _newest(run, name)
    DAMAGES[damage](file)
    before = contents(run)
    line = refused("evaluate", run)
    assert f"{file.parent.name}/" in line and ("damaged" in line or "missing" in line or "not readable" in line)
    assert contents(run) == before


def test_with_every_checkpoint_damaged_nothing_is_resumed(run: Path) -> None:
    for file in run.glob("weights/planner/v*/learner.json"):
        _cut(file)
    line = refused("train", run, "--resume")
    assert "learner.json: damaged" in line


@pytest.mark.parametrize("damage", ["cut", "empty", "remove"])
def test_a_damaged_store_is_named(damage: str, run: Path) -> None:
    DAMAGES[damage](run / "store.db")
    before = contents(run)
    assert "store.db" in refused("train", run / "config.toml", "--run", run, "--resume")
    assert "store.db" in refused("evaluate", run)
    assert contents(run) == before


def test_a_damaged_record_of_the_store_is_noticed(run: Path) -> None:
    from mgrpo.errors import RunFolderError
    from mgrpo.store.opening import open_store

    file = run / "store.db"
    data = file.read_bytes()
    inside = data.rindex(b"\x28\xb5\x2f\xfd") + 40  # of a compressed record
    file.write_bytes(data[:inside] + bytes([data[inside] ^ 1]) + data[inside + 1 :])
    store = open_store(file)
    with pytest.raises(RunFolderError, match="damaged record"):
        for group in range(store.committed()):
            store.group(group)
    store.close()


def test_a_damaged_recipe_of_a_run_is_named(run: Path) -> None:
    (run / "config.toml").write_text("name = ")
    before = contents(run)
    assert "config.toml" in refused("evaluate", run)
    assert "config.toml" in refused("train", SMOKE, "--run", run, "--resume")
    assert contents(run) == before


def test_the_smoke_recipe_itself_is_sound() -> None:
    assert load(SMOKE).name == "smoke"
