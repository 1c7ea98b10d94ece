"""The guides are programs: their blocks are written to files, and their commands run."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from command_line import ROOT, contents, mgrpo, version_folder

from mgrpo.run import RunFolder

GUIDES = ROOT / "docs" / "guides"


def files_of(guide: str) -> dict[str, str]:
    """Blocks under a line that is just a file's name; blocks of one name are one file."""
    found: dict[str, str] = defaultdict(str)
    for name, block in re.findall(r"^`([^`\n]+)`\n\n```\w+\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL):
        found[name] += block + "\n"
    return dict(found)


def commands_of(guide: str) -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guide's files, after its commands."""
    folder = tmp_path_factory.mktemp("project")
    guide = (GUIDES / "your-own-parts.md").read_text(encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        patch.delitem(sys.modules, "my_parts", raising=False)
        for name, text in files_of(guide).items():
            Path(name).write_text(text, encoding="utf-8")
        commands = commands_of(guide)
        assert [command[:2] for command in commands][:2] == [["mgrpo", "plan"], ["mgrpo", "train"]]
        for _, *arguments in commands:
            result = mgrpo(*arguments)
            assert result.code == 0, (arguments, result)
        patch.delitem(sys.modules, "my_parts", raising=False)
    return folder


def test_tool_script_grader_and_reward_took_part(project: Path) -> None:
    _, store = RunFolder(project / "runs" / "weather").open()
    try:
        groups = [store.group(id) for id in range(store.committed())]
    finally:
        store.close()
    assert len(groups) == 4 and {group.task.answer for group, _ in groups} == {"sun", "rain"}
    for group, rewards in groups:
        for rollout in group.rollouts:
            weather = rollout.root.turns[0].results[0]
            assert weather.text == group.task.answer and weather.error is None
            assert rollout.root.answer is not None and rollout.root.answer.answer == group.task.answer
            tokens = sum(len(turn.token_ids) for turn in rollout.root.turns)
            reward = rewards[rollout.root.id]
            assert reward.parts["correct"] == 1.0 and reward.value == pytest.approx(1.0 - 0.01 * tokens)
            (clerk,) = rollout.children(rollout.root.id)
            assert rewards[clerk.id].parts["expert"] is not None


def test_the_clerk_learned_and_the_desk_did_not(project: Path) -> None:
    weights = project / "runs" / "weather" / "weights"
    assert {path.name for path in weights.iterdir()} == {"clerk"}
    assert len(list((weights / "clerk").iterdir())) == 3
    first, newest = (contents(version_folder(weights.parent, "clerk", v))["model.safetensors"] for v in (0, 2))
    assert first != newest


def test_the_prompt_file_is_what_the_clerk_read(project: Path) -> None:
    from mgrpo.team import tokenizer_of

    run = RunFolder(project / "runs" / "weather")
    config, store = run.open()
    group, _ = store.group(0)
    store.close()
    (clerk,) = group.rollouts[0].children(group.rollouts[0].root.id)
    text = tokenizer_of(run.path / "models" / "clerk").decode(clerk.turns[0].context_ids)
    assert text.startswith("<|system|> Find the weather . Use search and visit .") and "<unk>" not in text
    assert config.agents["clerk"].prompt == "Find the weather . Use search and visit ."


def test_the_exported_clerk_is_there(project: Path) -> None:
    assert (project / "models" / "clerk" / "model.safetensors").is_file()


def test_the_python_of_the_guide(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    runpy.run_path("run.py")
    assert capsys.readouterr().out.splitlines()[-1] == "answer: rain"
    sys.modules.pop("my_parts", None)
