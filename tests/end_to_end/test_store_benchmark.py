"""The store's benchmark runs, cut short: every number that it is asked for is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from command_line import ROOT


def test_commits_takes_and_turns_are_measured_beside_their_floors(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "store.py"), "--quick", "--trajectories", "480"]
    command += ["--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    numbers = ("commit_ratio", "commit_ms", "bare_ms", "take_ratio", "take_large_ms", "turn_ms_10", "turn_ms_2000")
    assert all(found[key] > 0 for key in numbers)
    assert found["large_trajectories"] == 480 and found["commit_bytes"] > 50_000
    assert "commit 24 x 1,000 tokens" in done.stdout
