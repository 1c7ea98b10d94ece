"""How a role that is called often drowns itself, or others, and how the weights here prevent it.

    python benchmarks/amplification.py [--rates 1 4] [--seeds 5] [--steps 80] [--figure FILE] [--json FILE]

Policies with several calls of one role per prompt amplify that role's gradient, up to a cliff in accuracy (arXiv
2605.24202). In miniature: a searcher answers one of 8 ways to each of 16 subtasks, n times in every rollout, for 8
rollouts of a question; one call in ten is graded wrongly. It learns by SGD on the clipped surrogate of
group-relative advantages, through the project's own alignment, comparison, coefficients and loss.

    naive    every call counts 1, and the loss is the sum over calls divided by the number of rollouts
    mgrpo    every call counts d / d_k, and the loss is divided by the sum of these weights

Three questions: how the gradient of the first step grows with n; what share of the gradient the searcher takes from a
planner that shares its weights, with one denominator over all rows or with one per agent; and what is learned.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from mgrpo.algorithm.advantages import advantages
from mgrpo.algorithm.alignment import align
from mgrpo.algorithm.coefficients import gradient_mass, token_coefficients
from mgrpo.algorithm.loss import Objective, objective_loss
from mgrpo.algorithm.packing import pack
from mgrpo.types import Parent, Reply, Reward, Row, Sample, Trajectory, TrajectoryId, Turn

SUBTASKS, ANSWERS, HIDDEN, QUESTIONS, K, WRONG_GRADES = 16, 8, 8, 4, 8, 0.1
RATES = (0.25, 1.0, 4.0, 16.0)  # learning rates of SGD
WAYS = ("naive", "mgrpo")


@dataclass(frozen=True)
class Outcome:
    """After training: probability of the right answer, entropy (nats), and the first step's gradient norm."""

    accuracy: float
    entropy: float
    first_gradient: float


class Searcher:
    """A network of one hidden layer, shared by all subtasks; the right answer to subtask s is s modulo ANSWERS."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        shapes = ((SUBTASKS, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, ANSWERS))
        self.weights = [
            torch.randn(s, generator=generator, dtype=torch.float64).mul(0.5).requires_grad_() for s in shapes
        ]

    def logits(self) -> Tensor:
        """[SUBTASKS, ANSWERS]"""
        embedded, inner, outer = self.weights
        return (embedded.tanh() @ inner).tanh() @ outer

    def step(self, calls: int) -> list[Sample]:
        """The calls of a step: QUESTIONS subtasks, K rollouts of each, ``calls`` calls in each rollout."""
        with torch.no_grad():
            logprobs = self.logits().log_softmax(-1).tolist()
        found = []
        for question in range(QUESTIONS):
            subtask = self.draw.randrange(SUBTASKS)
            weights = [2.718281828459045**value for value in logprobs[subtask]]
            for rollout in range(K):
                for call in range(calls):
                    (answer,) = self.draw.choices(range(ANSWERS), weights)
                    id = TrajectoryId(question, rollout, "searcher", call)
                    right = (answer == subtask % ANSWERS) != (self.draw.random() < WRONG_GRADES)
                    found.append(sample(id, subtask, answer, logprobs[subtask][answer], float(right)))
        return found

    def scores(self, input_ids: Tensor) -> Tensor:
        """log pi(answer | subtask) of rows [subtask, answer]."""
        return self.logits().log_softmax(-1)[input_ids[:, 0], input_ids[:, 1]]

    def outcome(self, first_gradient: float) -> Outcome:
        p = self.logits().detach().softmax(-1)
        right = p[torch.arange(SUBTASKS), torch.arange(SUBTASKS) % ANSWERS].mean()
        return Outcome(float(right), float(-(p * p.clamp_min(1e-300).log()).sum(-1).mean()), first_gradient)


def sample(id: TrajectoryId, context: int, token: int, logprob: float, reward: float) -> Sample:
    turn = Turn((context,), (token,), (logprob,), 0, "stop", "", Reply())
    parent = None if id.agent == "planner" else Parent(TrajectoryId(id.group, id.rollout, "planner", 0), 0, 0)
    return Sample(Trajectory(id, "", (turn,), "answer", parent=parent), Reward(reward))


def weighed(samples: Sequence[Sample], way: str) -> tuple[list[Row], list[float]]:
    """Rows and the coefficient of a token of each."""
    if way == "mgrpo":
        rows = align(samples, "weight", 8, seed=0, step=0)
        return rows, token_coefficients(rows)
    rows = align(samples, "none", 8, seed=0, step=0)
    rollouts = len({(row.id.group, row.id.rollout) for row in rows})
    return rows, [1.0 / (row.sampled * rollouts) for row in rows]


def learn(way: str, calls: int, rate: float, steps: int, seed: int) -> Outcome:
    searcher, first = Searcher(seed), 0.0
    for step in range(steps):
        rows, coefficients = weighed(searcher.step(calls), way)
        values = advantages(rows).values
        gradient = [torch.zeros_like(weight) for weight in searcher.weights]
        for batch in pack(rows, values, coefficients, 4096, 0, drop_zero=True, dtype=torch.float64):
            new = searcher.scores(batch.input_ids)
            loss, _ = objective_loss(new, torch.zeros_like(new), batch, Objective())
            gradient = [g + own for g, own in zip(gradient, torch.autograd.grad(loss, searcher.weights), strict=True)]
        first = float(torch.cat([g.flatten() for g in gradient]).norm()) if step == 0 else first
        with torch.no_grad():
            for weight, g in zip(searcher.weights, gradient, strict=True):
                weight -= rate * g
    return searcher.outcome(first)


def share_of_searcher(calls: int, denominator: str, seed: int = 0) -> float:
    """Of the gradient mass of planner and searcher with one set of weights; rewards are right or wrong by a coin."""
    draw = random.Random(seed)
    ids = [TrajectoryId(q, k, "planner", 0) for q in range(QUESTIONS) for k in range(K)]
    ids += [TrajectoryId(q, k, "searcher", i) for q in range(QUESTIONS) for k in range(K) for i in range(calls)]
    samples = [sample(id, 0, 1, -1.0, float(draw.random() < 0.5)) for id in ids]
    planner, searcher = ([s for s in samples if s.trajectory.id.agent == name] for name in ("planner", "searcher"))
    mode = "weight" if denominator == "agent" else "none"
    parts = [align(planner, "none", None, seed=0, step=0), align(searcher, mode, 8, seed=0, step=0)]
    rows = [row for part in parts for row in part]
    values = [value for part in parts for value in advantages(part).values]
    coefficients = token_coefficients(rows)
    if denominator == "agent":
        coefficients = [c for part in parts for c in token_coefficients(part)]
    mass = gradient_mass(rows, values, coefficients)
    return sum(m for (agent, _), m in mass.items() if agent == "searcher") / sum(mass.values())


# ---------------------------------------------------------------- output


def show(found: dict[str, Any], calls: Sequence[int]) -> Table:
    table = Table(title="n: calls of the searcher in every rollout", title_justify="left")
    for column in ("", *(f"n = {n}" for n in calls)):
        table.add_column(column, justify="left" if not column else "right")
    for way in WAYS:
        table.add_row(f"first gradient norm, {way}", *(f"{found['gradient'][way][str(n)]:.4f}" for n in calls))
    for denominator in ("weights", "agent"):
        cells = (f"{found['share'][denominator][str(n)]:.2f}" for n in calls)
        table.add_row(f"searcher's share, one denominator per {denominator}", *cells)
    for rate in found["rates"]:
        for way in WAYS:
            cells = (f"{found['accuracy'][way][rate][str(n)]:.2f}" for n in calls)
            table.add_row(f"accuracy after training, rate {rate}, {way}", *cells)
    return table


def draw_figure(path: Path, found: dict[str, Any], calls: Sequence[int]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours, labels = (
        {"naive": "#d55e00", "mgrpo": "#0072b2"},
        {"naive": "sum over calls / rollouts", "mgrpo": "d / d_k"},
    )
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
    for way in WAYS:
        line = {"color": colours[way], "label": labels[way], "marker": "o" if way == "mgrpo" else "s"}
        axes[0].plot(calls, [found["gradient"][way][str(n)] for n in calls], **line)
        for style, rate in zip(("-", "--", ":"), found["shown_rates"], strict=False):
            means = [found["accuracy"][way][rate][str(n)] for n in calls]
            axes[2].plot(calls, means, **(line | {"label": f"{labels[way]}, rate {rate}"}), linestyle=style)
    for denominator, way in (("weights", "naive"), ("agent", "mgrpo")):
        label = "one over all rows" if denominator == "weights" else "one per agent"
        axes[1].plot(calls, [found["share"][denominator][str(n)] for n in calls], "o-", color=colours[way], label=label)
    titles = ("Gradient of the first step", "Searcher's share, shared weights", "After training")
    names = ("gradient norm of the searcher", "share of gradient mass (0 to 1)", "probability of the right answer")
    for axis, title, name in zip(axes, titles, names, strict=True):
        axis.set_title(title, loc="left", fontweight="bold")
        axis.set(xlabel="calls of the searcher per rollout", ylabel=name, xscale="log")
        axis.set_xticks(calls, [str(n) for n in calls])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", alpha=0.3)
        beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if axis is axes[2] else {}
        axis.legend(frameon=False, title="denominator" if axis is axes[1] else None, **beside)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="learning rates of SGD")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plan = [(way, rate, n) for way in WAYS for rate in options.rates for n in options.calls]
    outcomes: dict[tuple[str, float, int], list[Outcome]] = {}
    for way, rate, n in track(plan, "training", console=Console(stderr=True)):
        outcomes[way, rate, n] = [learn(way, n, rate, options.steps, seed) for seed in range(options.seeds)]

    def mean(way: str, rate: float, n: int, what: str) -> float:
        return statistics.fmean(getattr(outcome, what) for outcome in outcomes[way, rate, n])

    rates, first = [f"{rate:g}" for rate in options.rates], options.rates[0]
    found: dict[str, Any] = {
        "rates": rates,
        "shown_rates": rates[1:3],
        "gradient": {w: {str(n): mean(w, first, n, "first_gradient") for n in options.calls} for w in WAYS},
        "share": {
            denominator: {str(n): share_of_searcher(n, denominator) for n in options.calls}
            for denominator in ("weights", "agent")
        },
    }
    for what in ("accuracy", "entropy"):
        found[what] = {
            way: {f"{r:g}": {str(n): mean(way, r, n, what) for n in options.calls} for r in options.rates}
            for way in WAYS
        }
    Console(width=120).print(show(found, options.calls))
    if options.figure:
        draw_figure(options.figure, found, options.calls)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
