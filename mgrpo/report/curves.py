"""curves.png from metrics.jsonl: success, reward, calls, entropy and shares of the gradient mass over a run's steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mgrpo.errors import ConfigError, DataError
from mgrpo.report.metrics_log import Record, read_metrics
from mgrpo.report.shares import invocation_shares, shares_by_step

FILE = "curves.png"
# Okabe and Ito (2008): told apart with any colour vision. Styles tell lines apart on grey paper.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)))
_EVALUATIONS = ("o", "s", "^", "D", "v", "P")
# Of the width, for the stages in which the team acts by itself; within its kind a stage's share goes by the square
# root of its steps. On a plain scale a long warm-up would leave a sliver for what one wants to see.
_TEAM_WIDTH = 0.75
_TICK_DISTANCE = 0.07  # of the width, so that step numbers do not touch
_INVOCATIONS = 4  # of an agent that are drawn
_MASS = "sum over tokens\nof |coefficient x advantage| (0 to 1)"  # the gradient mass

Points = list[tuple[float, float]]  # (place, value)


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps ``first`` to ``first + steps`` lie at places ``left`` to ``right`` of the horizontal axis, in [0, 1].

    Where ``demonstrations`` are learned from, what was collected is the teacher's and no success of the team.
    """

    name: str
    first: int
    steps: int
    demonstrations: bool
    left: float
    right: float

    def place(self, step: float) -> float:
        return self.left + (self.right - self.left) * (step - self.first) / self.steps


@dataclass(frozen=True, slots=True)
class Curves:
    """What is drawn. Points of one line are split by stage, so that nothing is smoothed across a border."""

    stages: tuple[Stage, ...]
    success: list[Points]
    evaluations: Mapping[str, Points]
    rewards: Mapping[str, list[Points]]
    calls: Mapping[str, list[Points]]
    entropy: Mapping[str, list[Points]]
    agent_shares: Mapping[str, list[Points]]
    invocation_shares: Mapping[str, list[Points]]  # by agent/index, within the agent


def draw_curves(folder: Path) -> Path:
    """Write ``folder``/curves.png and return its path.

    Raises RunFolderError without metrics.jsonl, DataError if no step is in it yet, ConfigError without matplotlib.
    """
    curves = read_curves(read_metrics(folder), str(folder))
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"curves need matplotlib ({error}); run: pip install mgrpo[train]") from error
    figure = Figure(figsize=(9.5, 9.6), layout="constrained", facecolor="white")
    axes = figure.subplots(3, 2, sharex=True).ravel()
    _success(axes[0], curves)
    for axis, (lines, ylabel, title) in zip(axes[1:], _panels(curves), strict=True):
        _lines(axis, lines, ylabel, title)
    for index, axis in enumerate(axes):
        _frame(axis, curves.stages, names=index < 2)
        top = axis.get_ylim()[1]
        axis.set_ylim(bottom=0.0, top={2: max(1.02, top), 3: top}.get(index, 1.02))  # counts and nats; the rest, shares
    for axis in axes[4:]:
        axis.set_xlabel("step of the run (demonstrations squeezed)")
    path = Path(folder) / FILE
    temporary = path.with_name(f".{FILE}")
    figure.savefig(temporary, dpi=150, format="png")
    temporary.replace(path)
    return path


def _panels(curves: Curves) -> tuple[tuple[Mapping[str, list[Points]], str, str], ...]:
    """Lines, label of their axis and title of every panel but the first."""
    return (
        (curves.rewards, "mean reward of a trajectory (0 to 1)", "Reward per agent"),
        (curves.calls, "calls per rollout (mean count)", "Calls per rollout"),
        (curves.entropy, "entropy (nats per token)", "Entropy per agent"),
        (curves.agent_shares, f"share of the {_MASS}", "Share of gradient per agent"),
        (curves.invocation_shares, f"share of its agent's {_MASS}", "Share of gradient per invocation"),
    )


# ---------------------------------------------------------------- what to draw


def read_curves(records: Sequence[Record], where: str = "metrics") -> Curves:
    """Raises DataError that names ``where`` if nothing was collected, learned or evaluated yet."""
    stages = _stages(records)
    if not stages or all(record["kind"] in ("stage", "alarm") for record in records):
        raise DataError(f"{where}: no step in its metrics yet; train first")
    collected = [record for record in records if record["kind"] == "collect"]
    learned = [record for record in records if record["kind"] == "learn"]
    agents = dict.fromkeys(str(record["agent"]) for record in learned)
    own = {agent: [record for record in learned if record["agent"] == agent] for agent in agents}
    rewarded = _names(collected, "reward/")
    called = _names(collected, "calls/")
    calls = {agent: f"calls/{agent}" for agent in called} if len(called) > 1 else {"sub-agents": "calls_per_rollout"}
    return Curves(
        stages,
        _by_stage(stages, collected, "success", taught=False),
        _evaluations(stages, records),
        {agent: _by_stage(stages, collected, f"reward/{agent}", taught=False) for agent in rewarded},
        {name: _by_stage(stages, collected, key, taught=False) for name, key in calls.items()},
        {agent: _by_stage(stages, own[agent], "entropy", taught=False) for agent in agents},
        _shares(stages, shares_by_step(learned)),
        _invocations(stages, own),
    )


def _names(records: Sequence[Record], prefix: str) -> list[str]:
    names = (key.removeprefix(prefix) for record in records for key in record if key.startswith(prefix))
    return list(dict.fromkeys(names))


def _stages(records: Sequence[Record]) -> tuple[Stage, ...]:
    spans: dict[int, tuple[str, int, int, bool]] = {}
    for record in records:
        if record["kind"] == "stage":
            first, steps = int(record["step"]), max(1, int(record["steps"]))
            spans[first] = (str(record["name"]), first, steps, bool(record.get("demonstrations")))
    kinds = {span[3] for span in spans.values()}
    totals = {kind: sum(span[2] ** 0.5 for span in spans.values() if span[3] == kind) for kind in kinds}
    shares = {True: 1.0 - _TEAM_WIDTH, False: _TEAM_WIDTH} if len(kinds) == 2 else dict.fromkeys(kinds, 1.0)
    edges = [0.0]
    for _, _, steps, kind in spans.values():
        edges.append(edges[-1] + shares[kind] * steps**0.5 / totals[kind])
    return tuple(Stage(*span, *edge) for span, edge in zip(spans.values(), pairwise(edges), strict=True))


def _by_stage(stages: Sequence[Stage], records: Sequence[Record], key: str, taught: bool = True) -> list[Points]:
    """Known values at the end of their steps, stage by stage. ``taught`` False leaves demonstrations out, in which
    the teacher acts, and an untrained model's entropy would hide all that follows."""
    return [
        [
            (stage.place(record["step"] + 1), float(record[key]))
            for record in records
            if record.get(key) is not None
            and stage.first <= record["step"] < stage.first + stage.steps
            and (taught or not stage.demonstrations)
        ]
        for stage in stages
    ]


def _evaluations(stages: Sequence[Stage], records: Sequence[Record]) -> dict[str, Points]:
    """By name; the weights after ``step`` steps lie at the border between two stages if a stage ends there."""
    result: dict[str, Points] = {}
    for record in records:
        if record["kind"] != "evaluate" or record.get("success") is None:
            continue
        step = int(record["step"])
        stage = next((stage for stage in stages if stage.first <= step <= stage.first + stage.steps), stages[-1])
        result.setdefault(str(record["name"]), []).append((min(1.0, stage.place(step)), float(record["success"])))
    return result


def _shares(stages: Sequence[Stage], steps: Mapping[int, Mapping[str, float]]) -> dict[str, list[Points]]:
    names = dict.fromkeys(name for shares in steps.values() for name in shares)
    return {
        name: _by_stage(stages, [{"step": step, **shares} for step, shares in steps.items()], name) for name in names
    }


def _invocations(stages: Sequence[Stage], learned: Mapping[str, Sequence[Record]]) -> dict[str, list[Points]]:
    """Of the agents that were called more than once in some rollout: the invocations that moved them most."""
    lines: dict[str, list[Points]] = {}
    for agent, records in learned.items():
        steps = {int(record["step"]): invocation_shares(record) for record in records}
        totals: Counter[int] = Counter()
        for shares in steps.values():
            totals.update(shares)
        shown = sorted(index for index, _ in totals.most_common(_INVOCATIONS)) if len(totals) > 1 else []
        named = {step: {f"{agent}/{i}": shares.get(i, 0.0) for i in shown} for step, shares in steps.items() if shares}
        lines |= _shares(stages, named)
    return lines


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Centred moving average; at the ends over what is there."""
    half = window // 2
    return [sum(part) / len(part) for part in (values[max(0, i - half) : i + half + 1] for i in range(len(values)))]


# ---------------------------------------------------------------- how to draw it


def _success(axis: Any, curves: Curves) -> None:
    _line(axis, curves.success, _COLOURS[0], "-", "training rollouts")
    for index, (name, points) in enumerate(curves.evaluations.items()):
        style = {"marker": _EVALUATIONS[index % len(_EVALUATIONS)], "color": "black", "markerfacecolor": "white"}
        linestyle = ":" if len(points) > 1 else ""
        axis.plot(
            *zip(*points, strict=True), linestyle=linestyle, markersize=6, label=name, clip_on=False, zorder=4, **style
        )
    axis.set_ylabel("questions answered right (0 to 1)")
    axis.set_title("Success", loc="left", fontweight="bold", pad=16)
    _legend(axis)


def _lines(axis: Any, lines: Mapping[str, list[Points]], ylabel: str, title: str) -> None:
    for index, (name, parts) in enumerate(lines.items()):
        _line(axis, parts, _COLOURS[index % len(_COLOURS)], _STYLES[index % len(_STYLES)], name)
    axis.set_ylabel(ylabel)
    axis.set_title(title, loc="left", fontweight="bold", pad=16 if title.startswith("Reward") else 6)
    _legend(axis)


def _legend(axis: Any) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8)


def _line(axis: Any, parts: list[Points], colour: str, style: Any, name: str) -> None:
    for points in filter(None, parts):
        places, values = zip(*points, strict=True)
        window = max(1, len(values) // 8)
        axis.plot(places, values, ".", color=colour, alpha=0.35, markersize=3, markeredgewidth=0)
        axis.plot(places, smoothed(values, window), linestyle=style, color=colour, linewidth=1.8, label=name)
        name = "_"  # one entry in the legend, whatever the number of stages


def _frame(axis: Any, stages: Sequence[Stage], names: bool) -> None:
    """Stages as bands, darker where demonstrations are learned from, with names above the upper panels."""
    for stage in stages:
        axis.axvspan(stage.left, stage.right, color="black", alpha=0.09 if stage.demonstrations else 0.02, linewidth=0)
        axis.axvline(stage.left, color="0.6", linewidth=0.6)
        if names:
            _name(axis, stage)
    axis.set_xlim(0.0, 1.0)
    ticks = dict(_ticks(stages))
    axis.set_xticks(list(ticks), [str(step) for step in ticks.values()])
    axis.grid(axis="y", color="0.9", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _name(axis: Any, stage: Stage) -> None:
    """Above a wide band, along a narrow one."""
    narrow = stage.right - stage.left < 0.02 * len(stage.name)
    where = {"y": 0.97, "va": "top", "rotation": 90} if narrow else {"y": 1.01, "va": "bottom"}
    middle, transform = (stage.left + stage.right) / 2, axis.get_xaxis_transform()
    axis.text(x=middle, s=stage.name, ha="center", fontsize=8, color="0.3", transform=transform, **where)


def _ticks(stages: Sequence[Stage]) -> list[tuple[float, int]]:
    """(place, step): the ends first, then quarters of wide stages and borders, where there is room for a number."""
    ends = [(stages[0].left, stages[0].first), (1.0, stages[-1].first + stages[-1].steps)]
    borders = [(stage.left, stage.first) for stage in reversed(stages)]
    quarters = [
        (stage.place(step), step)
        for stage in stages
        if stage.right - stage.left > 4 * _TICK_DISTANCE
        for step in (stage.first + stage.steps * i // 4 for i in (1, 2, 3))
    ]
    ticks: list[tuple[float, int]] = []
    for place, step in [*ends, *borders, *quarters]:
        if all(abs(place - taken) >= _TICK_DISTANCE for taken, _ in ticks):
            ticks.append((place, step))
    return sorted(ticks)
