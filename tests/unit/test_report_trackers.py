"""Trackers write what their own readers read back."""

from __future__ import annotations

import sqlite3
import sys
import time
from pathlib import Path

import pytest
from report_samples import config_of

from mgrpo.config.registry import settings
from mgrpo.errors import ConfigError
from mgrpo.report.trackers import TensorBoard, Trackio, WandB


def test_tensorboard_is_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra mgrpo[tensorboard] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = settings("tracker", {"type": "tensorboard"}, "trackers.0").build(folder=tmp_path, config=config_of())
    for step in (0, 1):
        tracker.log(step, {"collect/success": 0.25 + step / 2})
        tracker.log(step, {"learn/planner/loss": 1.5})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("collect/success")] == [(0, 0.25), (1, 0.75)]
    assert [e.value for e in events.Scalars("learn/planner/loss")] == [1.5, 1.5]


def test_tensorboard_writes_where_it_is_told(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra mgrpo[tensorboard] is not installed")
    TensorBoard(folder=tmp_path / "elsewhere").build(tmp_path / "run", config_of()).close()
    assert list((tmp_path / "elsewhere").iterdir()) and not (tmp_path / "run").exists()


def test_wandb_offline_leaves_a_run_folder(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra mgrpo[wandb] is not installed")
    tracker = WandB(project="p", mode="offline").build(tmp_path, config_of())
    tracker.log(3, {"collect/success": 0.625})
    tracker.log(2, {"learn/planner/loss": 1.5})  # a learner that is behind
    tracker.close()
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = run.glob("*.wandb")
    expected = (b"collect/success", b"0.625", b"learn/planner/loss")
    deadline = time.monotonic() + 20.0  # its service may write the file a moment after the run is finished
    while not all(words in file.read_bytes() for words in expected) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(words in file.read_bytes() for words in expected)


def test_trackio_keeps_a_local_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # trackio reads its folder when it is imported.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    pytest.importorskip("trackio", reason="the extra mgrpo[trackio] is not installed")
    tracker = Trackio(project="p").build(tmp_path / "run7", config_of())
    tracker.log(3, {"collect/success": 0.625})
    tracker.close()
    (file,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    assert [(name, step) for name, step, _ in rows] == [("sample-run7", 3)] and "0.625" in str(rows[0][2])


@pytest.mark.parametrize("tracker", [TensorBoard(), WandB(), Trackio()], ids=lambda tracker: tracker.type)
def test_a_package_that_is_missing_is_named(
    tracker: TensorBoard | WandB | Trackio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, tracker.type, None)
    with pytest.raises(ConfigError, match=rf"pip install mgrpo\[{tracker.type}\]"):
        tracker.build(tmp_path, config_of())
    with pytest.raises(ConfigError, match=rf"pip install mgrpo\[{tracker.type}\]"):
        tracker.check()


def test_unknown_keys_and_modes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trackers.0.projct: unknown key \(did you mean 'project'\?\)"):
        settings("tracker", {"type": "wandb", "projct": "x"}, "trackers.0")
    with pytest.raises(ConfigError, match=r"trackers.0.mode"):
        settings("tracker", {"type": "wandb", "mode": "sometimes"}, "trackers.0")
