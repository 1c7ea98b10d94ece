"""Where the two loops meet: what collectors write, what learners take and publish, what readers see.

::

    collect   waits for: learners near enough (`trained`), newest weights (`latest`)      produces: `commit`
    learn     waits for: `take` of its next groups                                        produces: `publish`
    viewer, evaluation   `Reader`, never a write
    all       `Ledger`: leases on what they are about to write, and who is there

The cursor of an agent is derived, never stored beside the data: `trained(agent)` counts the groups named by that
agent's publications, and a publication is one row. So weights and the groups they were trained on appear together
or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mgrpo.types import Ending, Group, Reward, Share, Task, TrajectoryId

PartKind = Literal["engine", "tools", "collect", "learn"]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a store belongs to. ``config`` is the resolved config, JSON-able; ``created`` is seconds since the epoch."""

    seed: int
    config: Mapping[str, Any] = field(default_factory=dict)
    created: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """One agent's weights, as others find them. Versions of an agent only grow.

    ``handle`` is the weights' folder relative to the run folder, ``checksum`` names their content; ``step`` and
    ``stage`` say which learner step published them.
    """

    agent: str
    version: int
    handle: str
    checksum: str
    step: int
    stage: str


@dataclass(frozen=True, slots=True)
class Publication:
    """One `publish`: the weights served afterwards, the groups consumed for them and the step's metrics.

    A step without rows for this agent has a publication that repeats the previous version.
    """

    weights: WeightVersion
    consumed: range
    metrics: Mapping[str, float]
    created: float = field(default=0.0, compare=False)  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class TrajectorySummary:
    """What a list of trajectories shows, read without decoding a token. Versions are those of sampled tokens only."""

    id: TrajectoryId
    parent: TrajectoryId | None
    ending: Ending
    reward: float | None  # None = unknown
    sampled_tokens: int
    min_version: int | None  # None where nothing was sampled
    max_version: int | None
    failure: str | None  # kind


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One group at a glance; trajectories in order of rollout, root first."""

    id: int
    task: Task
    rollouts: int
    failed_rollouts: int
    trajectories: tuple[TrajectorySummary, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals over all committed groups, finished in order or not."""

    groups: int = 0
    rollouts: int = 0
    failed_rollouts: int = 0
    trajectories: int = 0
    sampled_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of ``owner`` to write what ``name`` stands for. ``fence`` grows with every grant of the store."""

    name: str  # collect/FIRST_GROUP, learn/AGENT, evaluate/WHEN
    owner: str
    fence: int


@dataclass(frozen=True, slots=True)
class Part:
    """A process at work. ``state`` is "" while all is well, else one line that says what is not."""

    name: str  # unique in the run, such as serve-planner-0
    kind: PartKind
    agent: str = ""
    url: str = ""  # where it is reached
    instance: str = ""  # of the process: another one after a restart
    version: int = -1  # of the weights that it serves
    state: str = ""


class Ledger(Protocol):
    """Who may write what, and who is there; see ledger.py. Seconds are by the database's clock."""

    def lease(self, name: str, owner: str, seconds: float) -> Lease | None:
        """The lease for so many seconds; None while another owner holds it, or where it is done.

        Granted to its present owner too, with a new fence: that is a process which came back.
        """
        ...

    def renew(self, lease: Lease, seconds: float) -> None:
        """So many seconds from now. Raises LeaseLost where it was given to another or given back."""
        ...

    def release(self, lease: Lease, done: bool = False) -> None:
        """Others may have it, or with ``done`` nobody ever again. Does nothing where it was lost."""
        ...

    def done(self, name: str) -> bool:
        """Whether a lease of this name was released as done."""
        ...

    def announce(self, part: Part, seconds: float) -> None:
        """``part`` is there, for so many seconds; replaces what it said before."""
        ...

    def retire(self, name: str) -> None:
        """The part of this name is gone."""
        ...

    def parts(self, kind: PartKind | None = None, agent: str | None = None) -> list[Part]:
        """Those whose time has not run out, by name."""
        ...


class CollectStore(Ledger, Protocol):
    """The collecting side. A group is committed whole or not at all."""

    def committed(self) -> int:
        """The number n for which groups 0..n-1 are all committed: where a collector goes on after a crash."""
        ...

    def missing(self, ids: range) -> list[int]:
        """Those of ``ids`` that are not committed."""
        ...

    def commit(
        self, groups: Sequence[Group], rewards: Mapping[TrajectoryId, Reward], lease: Lease | None = None
    ) -> None:
        """Writes groups and rewards in one transaction. A group id that is already there changes nothing.

        Writes nothing and raises LeaseLost where ``lease`` is not the newest of its name, ValueError where an id, a
        parent or a reward does not fit its group.
        """
        ...

    def trained(self, agent: str) -> int:
        """How many groups ``agent`` has consumed: the groups 0..n-1."""
        ...

    def latest(self, agent: str) -> WeightVersion | None:
        """The newest published weights, with the step and stage of the newest publication; None before the first."""
        ...


class LearnStore(Ledger, Protocol):
    """The learning side: one agent's rows in, its weights out."""

    def take(self, agent: str, first: int, count: int) -> list[Share] | None:
        """What the agent learns from of groups ``first .. first+count-1``: its samples, ordered by (rollout,
        invocation) and empty where it was not called, and the rewards of all roots. None while a group is missing.
        Consumes nothing, and reads no other agent's trajectories."""
        ...

    def publish(
        self,
        version: WeightVersion,
        consumed: range | Sequence[int],
        metrics: Mapping[str, float] | None = None,
        lease: Lease | None = None,
    ) -> None:
        """Publishes weights and consumes the next groups in one transaction; the same call again changes nothing.

        ``consumed`` continues at `trained` without a gap, and may be empty (the initial weights).
        ``version.version`` repeats the newest one when the agent had no rows. Writes nothing and raises LeaseLost
        where ``lease`` is not the newest of its name, UserError where another learner of this agent came first,
        ValueError where groups or weights do not fit.
        """
        ...

    def trained(self, agent: str) -> int: ...

    def latest(self, agent: str) -> WeightVersion | None: ...


class Reader(Protocol):
    """What a viewer and an evaluation read while others write."""

    @property
    def run(self) -> RunInfo: ...

    def counts(self) -> Counts: ...

    def groups(self, first: int, count: int) -> list[GroupSummary]:
        """Summaries of the committed groups with ids ``first .. first+count-1``, by id."""
        ...

    def group(self, id: int) -> tuple[Group, dict[TrajectoryId, Reward]]:
        """Exactly what was committed. Raises KeyError where there is no such group."""
        ...

    def publications(self, agent: str | None = None) -> list[Publication]:
        """Versions, consumption and metrics in the order published, of one agent or of all (agent by agent)."""
        ...


class Store(CollectStore, LearnStore, Reader, Protocol):
    """All three sides. A new store is done when tests/contract/test_stores.py passes on it."""

    def close(self) -> None: ...
