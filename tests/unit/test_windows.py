"""One integer is a cursor: which groups belong to which step of which stage."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_recipe import REINFORCE, WARM_UP, tiny

from mgrpo.config import Config
from mgrpo.config.windows import total_steps, windows
from mgrpo.errors import RunFolderError


def stage(name: str, windows: int, sync: int, groups: int) -> dict[str, Any]:
    teacher = WARM_UP if sync > 1 else REINFORCE
    return teacher | {"name": name, "steps": windows * sync, "weight_sync_steps": sync, "groups_per_step": groups}


STAGES = [stage("a", 3, 2, 4), stage("b", 2, 1, 3), stage("c", 1, 5, 1)]
CONFIG = tiny(stages=STAGES)


def test_every_group_belongs_to_one_step_over_all_stages() -> None:
    """R-46: no group is skipped, none is trained twice."""
    steps = [step for window in windows(CONFIG) for step in window.steps]
    assert [step for step, _, _ in steps] == list(range(total_steps(CONFIG))) == list(range(6 + 2 + 5))
    assert [id for _, _, ids in steps for id in ids] == list(range(6 * 4 + 2 * 3 + 5 * 1))
    assert [s for _, s, _ in steps] == [0, 1, 2, 3, 4, 5, 0, 1, 0, 1, 2, 3, 4]


def test_windows_follow_each_other_and_cover_their_steps() -> None:
    every = list(windows(CONFIG))
    assert [w.stage.name for w in every] == ["a"] * 3 + ["b"] * 2 + ["c"]
    assert all(a.end_group == b.first_group for a, b in pairwise(every))
    for window in every:
        assert [id for _, _, ids in window.steps for id in ids] == list(window.groups)
        assert CONFIG.stages[window.stage_index] is window.stage


def test_a_run_goes_on_at_any_window_and_only_there() -> None:
    every = list(windows(CONFIG))
    starts = [window.first_group for window in every]
    for from_group in range(every[-1].end_group):
        if from_group in starts:
            assert list(windows(CONFIG, from_group)) == every[starts.index(from_group) :]
        else:
            with pytest.raises(RunFolderError, match=f"group {from_group} lies inside a step of stage '[abc]'"):
                list(windows(CONFIG, from_group))
    assert list(windows(CONFIG, every[-1].end_group)) == []


sizes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))


@given(st.lists(sizes, min_size=1, max_size=4))
def test_any_recipe_has_a_gapless_numbering(shapes: list[tuple[int, int, int]]) -> None:
    config = _config([stage(f"s{i}", *shape) for i, shape in enumerate(shapes)])
    ids = [id for window in windows(config) for _, _, ids in window.steps for id in ids]
    assert ids == list(range(sum(n * sync * groups for n, sync, groups in shapes)))
    assert total_steps(config) == sum(n * sync for n, sync, _ in shapes)


def _config(stages: list[dict[str, Any]]) -> Config:
    return CONFIG.model_copy(update={"stages": tuple(type(CONFIG.stages[0]).model_validate(s) for s in stages)})
