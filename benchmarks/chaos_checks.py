"""What must be true of the store and the weights of a disturbed run (chaos_recipe.py), whatever was killed."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_recipe import GROUPS_PER_STEP, NOTES, PROMPTS, K, calls, moves

from mgrpo.config import Config
from mgrpo.config.windows import total_groups
from mgrpo.errors import CheckpointError
from mgrpo.report.metrics_log import read_metrics
from mgrpo.store.base import Publication, Store
from mgrpo.store.records import encode
from mgrpo.store.weights import WeightStore
from mgrpo.types import Group, Share, TrajectoryId

SEEN = "seen.txt"  # the counting policy's weights: "GROUP DIGEST" lines
LEFT_OVER = 3  # folders beside the kept versions that may wait to be pruned at the end


def digest(share: Share) -> str:
    """Of all that a learner gets of one group."""
    parts: Iterable[bytes] = (*map(encode, share.samples), repr(sorted(share.roots.items())).encode())
    return hashlib.sha256(b"/".join(parts)).hexdigest()[:16]


# ---------------------------------------------------------------- what is found


@dataclass
class Findings:
    """What is not as it should be, a line each, and what is only told."""

    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    told: Counter[str] = field(default_factory=Counter)

    def compare(self, what: str, expected: Iterable[object], found: Iterable[object]) -> None:
        """Two multisets: what is expected and not there is lost, what is there beyond that is duplicated."""
        wanted, there = Counter(expected), Counter(found)
        self.lost += [f"{what}: {item} is missing" for item in (wanted - there).elements()]
        self.duplicated += [f"{what}: {item} once too often" for item in (there - wanted).elements()]

    @property
    def clean(self) -> bool:
        return not (self.lost or self.duplicated or self.wrong)


def check(config: Config, folder: Path, store: Store, weights: WeightStore) -> Findings:
    """All invariants of a run that has ended."""
    findings = Findings()
    total = total_groups(config)
    groups = _groups(findings, store, total)
    _tasks(findings, groups)
    for agent in config.learners:
        published = store.publications(agent)
        _publications(findings, agent, published, total)
        _lineage(findings, agent, published, store, weights)
        _folders(findings, folder / "weights" / agent, published, config)
        if not config.max_staleness:
            _versions(findings, agent, groups, published)
    _metrics(findings, folder, total // GROUPS_PER_STEP, config.learners)
    _logs(findings, folder)
    findings.told["collected again"] = _collected_again(folder)
    return findings


def _groups(findings: Findings, store: Store, total: int) -> list[Group]:
    """Every group is there once and whole, its rows are what was rolled out, and one process collected it."""
    heads = store.groups(0, total + 1)
    findings.compare("groups", range(total), [head.id for head in heads])
    found = []
    for head in heads:
        group, rewards = store.group(head.id)
        found.append(group)
        expected = [id for k in range(K) for id in _rollout(head.id, k)]
        findings.compare(f"rows of group {head.id}", expected, [summary.id for summary in head.trajectories])
        findings.compare(f"trajectories of group {head.id}", expected, list(rewards))
        if (len(group.rollouts), head.rollouts, head.failed_rollouts) != (K, K, 0):
            findings.wrong.append(f"group {head.id}: {len(group.rollouts)} rollouts, {head.failed_rollouts} failed")
        if len({reward.parts["process"] for reward in rewards.values()}) != 1:
            findings.wrong.append(f"group {head.id}: rows of several processes")
    counts = store.counts()
    rows = sum(len(head.trajectories) for head in heads)
    if (counts.groups, counts.trajectories) != (len(heads), rows):
        findings.wrong.append(f"{counts} counted by heads, {len(heads)} groups and {rows} rows found")
    return found


def _rollout(group: int, index: int) -> list[TrajectoryId]:
    root = TrajectoryId(group, index, "planner", 0)
    return [root, *(TrajectoryId(group, index, "searcher", i) for i in range(calls(root)))]


def _tasks(findings: Findings, groups: Sequence[Group]) -> None:
    """Every task once in every epoch."""
    names = [str(line) for line in range(1, PROMPTS + 1)]
    by_epoch: dict[int, list[str]] = {}
    for group in groups:
        by_epoch.setdefault(group.id // PROMPTS, []).append(group.task.id)
    for epoch, asked in by_epoch.items():
        findings.compare(f"tasks of epoch {epoch}", names, asked)


def _publications(findings: Findings, agent: str, published: Sequence[Publication], total: int) -> None:
    """Every group consumed once, in order; a version for every step that moved the weights; fences never go back."""
    consumed = [id for publication in published for id in publication.consumed]
    findings.compare(f"groups consumed by {agent}", range(total), consumed)
    versions, version = [0], 0
    for step in range(total // GROUPS_PER_STEP):
        version += moves(step)
        versions.append(version)
    if [publication.weights.version for publication in published] != versions:
        findings.wrong.append(f"versions of {agent}: {[p.weights.version for p in published]}")
    fences = [int(publication.weights.handle.rpartition("-")[2]) for publication in published]
    if fences != sorted(fences) or consumed != sorted(consumed):
        findings.wrong.append(f"{agent}: fences {fences}, consumed {consumed}")


def _lineage(
    findings: Findings, agent: str, published: Sequence[Publication], store: Store, weights: WeightStore
) -> None:
    """Kept versions are whole, and made of exactly the groups that were consumed up to them, as they are stored."""
    stored: dict[int, str] = {}
    kept = {p.weights.version: p for p in reversed(published) if weights.exists(p.weights.handle)}
    for version, publication in kept.items():
        place = publication.weights
        try:
            folder = weights.get(place.handle, place.checksum, learner=True)
        except CheckpointError as error:
            findings.wrong.append(f"{agent} version {version}: {error}")
            continue
        seen = [line.split() for line in (folder / SEEN).read_text().splitlines()]
        made_of = [id for p in published[: published.index(publication) + 1] if _moved(p) for id in p.consumed]
        findings.compare(f"groups in version {version} of {agent}", made_of, [int(id) for id, _ in seen])
        for id, saw in seen:
            if stored.setdefault(int(id), _stored(store, agent, int(id))) != saw:
                findings.wrong.append(f"{agent} version {version}: saw another group {id} than is stored")
    if published[-1].weights.version not in kept:
        findings.wrong.append(f"{agent}: the newest version is not there")


def _moved(publication: Publication) -> bool:
    return bool(publication.metrics)


def _stored(store: Store, agent: str, group: int) -> str:
    taken = store.take(agent, group, 1)
    return digest(taken[0]) if taken else "nothing"


def _folders(findings: Findings, folder: Path, published: Sequence[Publication], config: Config) -> None:
    """Old versions are gone, and so is what killed learners left behind."""
    names = {path.name for path in folder.iterdir()}
    ours = {publication.weights.handle.rpartition("/")[2] for publication in published}
    most = config.keep_versions + config.launch.engines
    findings.told["folders left over"] += len(names - ours)
    if len(names & ours) > most or len(names - ours) > LEFT_OVER:
        findings.wrong.append(f"{folder}: {sorted(names)}")


def _versions(findings: Findings, agent: str, groups: Sequence[Group], published: Sequence[Publication]) -> None:
    """Synchronous: what was sampled for a step was sampled by the weights that the step before it published."""
    newest = {id: published[i - 1].weights.version for i, p in enumerate(published) for id in p.consumed}
    for group in groups:
        own = [t for rollout in group.rollouts for t in rollout.trajectories if t.id.agent == agent]
        versions = {turn.version for trajectory in own for turn in trajectory.turns}
        if versions != {newest.get(group.id)}:
            findings.wrong.append(f"group {group.id}: {agent} version {versions}, not {newest.get(group.id)}")


def _metrics(findings: Findings, folder: Path, steps: int, learners: Sequence[str]) -> None:
    """What is written before it counts as done is in the log; what is written after that may be missing."""
    told = {(r["kind"], r["step"], str(r.get("agent", r.get("name", "")))) for r in read_metrics(folder)}
    due = [("learn", step, agent) for step in range(steps) for agent in learners]
    due += [("evaluate", 0, "before"), ("evaluate", 0, "before_greedy")]
    due += [("evaluate", steps, "after"), ("evaluate", steps, "after_greedy")]
    findings.wrong += [f"metrics: no record of {key}" for key in due if key not in told]
    collected = [f"g{group}" for group in range(steps * GROUPS_PER_STEP)]
    there = {name for kind, _, name in told if kind == "collect"}
    findings.told["metrics of groups missing"] = sum(name not in there for name in collected)


def _logs(findings: Findings, folder: Path) -> None:
    for log in sorted(folder.glob("parts/*/log.txt")):
        text = log.read_text(errors="replace")
        if "Traceback" in text:
            lines = text.partition("Traceback")[2].splitlines()[1:]
            findings.wrong.append(f"{log}: " + next((line for line in lines if line[:1].strip()), lines[-1]))
        findings.told["leases lost"] += text.count("lost its lease")


# ---------------------------------------------------------------- what parts noted


def notes(folder: Path) -> dict[str, list[Mapping[str, Any]]]:
    """By part. Lines that a kill or a full disk cut short are left out."""
    return {path.stem: list(_whole(path)) for path in sorted((folder / NOTES).glob("*.jsonl"))}


def _whole(path: Path) -> Iterator[Mapping[str, Any]]:
    for line in path.read_bytes().splitlines():
        with suppress(ValueError):
            yield json.loads(line)


def _collected_again(folder: Path) -> int:
    committed = Counter(
        id for own in notes(folder).values() for n in own if n["what"] == "commit" for id in n["groups"]
    )
    return sum(times - 1 for times in committed.values())
