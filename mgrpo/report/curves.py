"""curves.png from metrics.jsonl: success, reward, calls per rollout and share of the gradient over a run's steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mgrpo.errors import ConfigError, DataError
from mgrpo.report.metrics_log import Record, read_metrics

FILE = "curves.png"
# Okabe and Ito (2008): told apart with any colour vision. Styles tell lines apart on grey paper.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)))
_EVALUATIONS = ("o", "s", "^", "D", "v", "P")
# Of the width, for the stages in which the team acts by itself; within its kind a stage's share goes by the square
# root of its steps. On a plain scale a long warm-up would leave a sliver for what one wants to see.
_TEAM_WIDTH = 0.75
_TICK_DISTANCE = 0.07  # of the width, so that step numbers do not touch

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
    calls: list[Points]
    gradient_shares: Mapping[str, list[Points]]


def draw_curves(folder: Path) -> Path:
    """Write ``folder``/curves.png and return its path.

    Raises RunFolderError without metrics.jsonl, DataError if no step is in it yet, ConfigError without matplotlib.
    """
    curves = read_curves(read_metrics(folder), str(folder))
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"curves need matplotlib ({error}); run: pip install mgrpo[train]") from error
    figure = Figure(figsize=(9.5, 6.6), layout="constrained", facecolor="white")
    axes = figure.subplots(2, 2, sharex=True).ravel()
    _success(axes[0], curves)
    _lines(axes[1], curves.rewards, "mean reward of a trajectory (0 to 1)", "Reward per agent")
    _lines(
        axes[2], {"sub-agent calls": curves.calls}, "calls per rollout (mean count)", "Calls per rollout", legend=False
    )
    _lines(axes[3], curves.gradient_shares, "share of the gradient norms (0 to 1)", "Share of gradient per agent")
    for index, axis in enumerate(axes):
        _frame(axis, curves.stages, names=index < 2)
        axis.set_ylim(bottom=0.0, top=max(1.02, axis.get_ylim()[1]) if index == 2 else 1.02)
    for axis in axes[2:]:
        axis.set_xlabel("step (optimizer steps of the run; demonstrations squeezed)")
    path = Path(folder) / FILE
    temporary = path.with_name(f".{FILE}")
    figure.savefig(temporary, dpi=150, format="png")
    temporary.replace(path)
    return path


# ---------------------------------------------------------------- what to draw


def read_curves(records: Sequence[Record], where: str = "metrics") -> Curves:
    """Raises DataError that names ``where`` if nothing was collected, learned or evaluated yet."""
    stages = _stages(records)
    if not stages or all(record["kind"] in ("stage", "alarm") for record in records):
        raise DataError(f"{where}: no step in its metrics yet; train first")
    collected = [record for record in records if record["kind"] == "collect"]
    learned = [record for record in records if record["kind"] == "learn"]
    agents = [key.removeprefix("reward/") for record in collected for key in record if key.startswith("reward/")]
    return Curves(
        stages,
        _by_stage(stages, collected, "success"),
        _evaluations(stages, records),
        {agent: _by_stage(stages, collected, f"reward/{agent}") for agent in dict.fromkeys(agents)},
        _by_stage(stages, collected, "calls_per_rollout"),
        {agent: _by_stage(stages, records, "share") for agent, records in _gradient_shares(learned).items()},
    )


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


def _by_stage(stages: Sequence[Stage], records: Sequence[Record], key: str) -> list[Points]:
    """Known values at the end of their steps, stage by stage; demonstrations are left out of what was collected."""
    return [
        [
            (stage.place(record["step"] + 1), float(record[key]))
            for record in records
            if record.get(key) is not None
            and stage.first <= record["step"] < stage.first + stage.steps
            and not (stage.demonstrations and record["kind"] == "collect")
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


def _gradient_shares(learned: Sequence[Record]) -> dict[str, list[Record]]:
    """grad_norm over the sum of all agents' in the same step, for steps in which several agents took their rows.

    An agent without rows, or whose rewards all tied, had no gradient: it counts 0, so that a planner that stops
    delegating shows. A norm that was not finite is unknown, and with it every share of its step.
    """
    norms: dict[int, dict[str, float | None]] = {}
    for record in learned:
        norms.setdefault(int(record["step"]), {})[str(record["agent"])] = record.get("grad_norm", 0.0)
    result: dict[str, list[Record]] = {}
    for step, by_agent in norms.items():
        known = {agent: float(norm) for agent, norm in by_agent.items() if norm is not None}
        total = sum(known.values())
        if len(known) == len(by_agent) > 1 and total > 0:
            for agent, norm in known.items():
                result.setdefault(agent, []).append({"kind": "learn", "step": step, "share": norm / total})
    return result


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


def _lines(axis: Any, lines: Mapping[str, list[Points]], ylabel: str, title: str, legend: bool = True) -> None:
    for index, (name, parts) in enumerate(lines.items()):
        _line(axis, parts, _COLOURS[index % len(_COLOURS)], _STYLES[index % len(_STYLES)], name)
    axis.set_ylabel(ylabel)
    axis.set_title(title, loc="left", fontweight="bold", pad=16 if title.startswith("Reward") else 6)
    if legend:
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
