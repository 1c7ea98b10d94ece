"""The nouns. Every value that passes between stages is one of these, frozen.

A question becomes text and ids in this order::

    Task -> Rollout (a tree of Trajectories, each a list of Turns) -> Group (K Rollouts of one Task)
    Group -> {TrajectoryId: Grade} -> {TrajectoryId: Reward}
    (Trajectory, Reward) = Sample -> Row -> Batch (algorithm/packing.py, tensors)

Worked example, one planner trajectory of two turns (ids are tokens, ``^`` marks sampled ones)::

    turn 0   context_ids  [1, 7, 8, 9, 2, 3]     <|user|> capital of Zubora <|end|> <|assistant|>
             token_ids    [20, 30, 8, 9, 21, 2]  ^<call> searcher capital Zubora </call> <|end|>
    turn 1   context_ids  [4, 40, 2, 3]           <|tool|> Merova <|end|> <|assistant|>
             token_ids    [22, 40, 23, 2]         ^<answer> Merova </answer> <|end|>
    its Row  token_ids    context 0 + sampled 0 + context 1 + sampled 1       (20 tokens)
             loss_mask    0 0 0 0 0 0 1 1 1 1 1 1 0 0 0 0 1 1 1 1             (True = sampled = trained)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

V = TypeVar("V")

# ---------------------------------------------------------------- identity


@dataclass(frozen=True, slots=True, order=True)
class TrajectoryId:
    """Names one trajectory everywhere: logs, store, viewer, test failures. Printed ``g5/r2/searcher/1``."""

    group: int
    rollout: int
    agent: str
    invocation: int

    def __str__(self) -> str:
        return f"g{self.group}/r{self.rollout}/{self.agent}/{self.invocation}"

    @classmethod
    def parse(cls, text: str) -> TrajectoryId:
        """Inverse of ``str``; raises ValueError on anything else."""
        parts = text.split("/")
        if len(parts) != 4 or parts[0][:1] != "g" or parts[1][:1] != "r":
            raise ValueError(f"not a trajectory id: {text!r} (expected g<group>/r<rollout>/<agent>/<invocation>)")
        return cls(int(parts[0][1:]), int(parts[1][1:]), parts[2], int(parts[3]))


# ---------------------------------------------------------------- the web an agent can read


@dataclass(frozen=True, slots=True)
class Page:
    """One document. ``links`` are URLs of other pages, in order of appearance."""

    url: str
    title: str
    text: str
    links: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SearchHit:
    title: str
    url: str
    snippet: str = ""
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class Corpus:
    """Pages that tools search and fetch, by URL. ``name`` identifies the content: equal names, equal pages."""

    name: str
    pages: Mapping[str, Page] = field(compare=False)


# ---------------------------------------------------------------- what is asked


@dataclass(frozen=True, slots=True)
class Task:
    """One question. ``id`` is unique within its source: two tasks with the same text are two tasks."""

    id: str
    question: str
    answer: str | None = None  # gold; None = not known here
    level: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)  # JSON-able: family, hops, split, world seed, ...


# ---------------------------------------------------------------- what an agent says and does


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message as an agent sees it. ``name`` is the tool's name for role "tool".

    ``ids`` are the stored token ids of a sampled assistant turn; they are never rendered again.
    """

    role: str  # "system" | "user" | "assistant" | "tool"
    content: str
    name: str = ""
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Findings:
    """What a trajectory returns: the answer, and for sub-agents what it rests on."""

    answer: str
    evidence: str = ""
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """A sampled turn, parsed. At most one of ``calls`` and ``answer`` is set; ``error`` says why it is malformed."""

    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    answer: Findings | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """An infrastructure failure as a value: excluded from statistics and loss, counted, never a zero."""

    kind: str  # the class name of an error in errors.py, e.g. "EngineTimeout"
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True, slots=True)
class ToolResult:
    """``text`` is what the model reads. ``error`` is the model's own mistake; ``failure`` is the infrastructure's."""

    text: str
    error: str | None = None
    failure: Failure | None = None


StopReason = Literal["stop", "length"]
Ending = Literal["answer", "max_turns", "max_context", "failure"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One engine call and what came of it.

    ``context_ids`` are the tokens appended to the row before sampling (never trained); ``token_ids`` are what the
    engine sampled, with one log-probability each, at the weight version that served them. ``new_row`` marks a turn
    whose chat template rewrote history: its ``context_ids`` are the whole prompt and a new row starts.
    """

    context_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    stop_reason: StopReason
    text: str
    reply: Reply
    results: tuple[ToolResult, ...] = ()  # one per call, in call order
    new_row: bool = False
    forced: bool = False  # the forced final-answer turn at a limit
    started: float = field(default=0.0, compare=False)  # seconds since the rollout began
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Parent:
    """The call that started a sub-agent trajectory: which trajectory, which turn of it, which call of that turn."""

    id: TrajectoryId
    turn: int
    call: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One agent's run on one (sub)task. ``parent`` is None for the planner, the root of the tree."""

    id: TrajectoryId
    task: str  # the question, or the delegated subtask
    turns: tuple[Turn, ...]
    ending: Ending
    answer: Findings | None = None
    parent: Parent | None = None
    context: str = ""  # optional context handed over with the subtask
    failure: Failure | None = None

    @property
    def valid_format(self) -> bool:
        """Every sampled turn parsed and the trajectory ended in a parsed, non-empty answer (docs/algorithm.md)."""
        return (
            self.answer is not None
            and bool(self.answer.answer.strip())
            and all(turn.reply.error is None for turn in self.turns)
        )


@dataclass(frozen=True, slots=True)
class Rollout:
    """One attempt at a task: the planner's trajectory first, then every descendant in order of id."""

    group: int
    index: int
    trajectories: tuple[Trajectory, ...]
    failure: Failure | None = None

    @property
    def root(self) -> Trajectory:
        return self.trajectories[0]

    def children(self, id: TrajectoryId) -> tuple[Trajectory, ...]:
        return tuple(t for t in self.trajectories if t.parent is not None and t.parent.id == id)


@dataclass(frozen=True, slots=True)
class Group:
    """K rollouts of one task. ``id`` counts the groups of a run."""

    id: int
    task: Task
    rollouts: tuple[Rollout, ...]


# ---------------------------------------------------------------- what it was worth


@dataclass(frozen=True, slots=True)
class Grade:
    """How right an answer is, in [0, 1], or unknown (None) with its cause. Unknown is not zero."""

    value: float | None
    cause: str | None = None
    grader: str = ""


@dataclass(frozen=True, slots=True)
class Reward:
    """The scalar of one trajectory (equations 4 and 5) with its parts, or unknown (None) with its cause."""

    value: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    cause: str | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """What a learner takes from the store: one trajectory of its own agent and the scalar it was worth."""

    trajectory: Trajectory
    reward: Reward


@dataclass(frozen=True, slots=True)
class Share:
    """What a learner takes of one group: its agent's samples, and what every one of the K rollouts was worth.

    ``roots`` holds the root's reward by rollout index, None where it is unknown: K and d_k can be counted, and a
    sub-agent can inherit the planner's advantage, without the planner's trajectories. ``bytes`` is what the samples
    took on their way from the store.
    """

    group: int
    samples: tuple[Sample, ...]
    roots: Mapping[int, float | None]
    bytes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One token sequence to learn from: consecutive ``turns`` of a trajectory, the first of which is ``first_turn``.

    A trajectory gives one row, or several where its template rewrote history (``segment``). ``weight`` is the
    alignment weight of the trajectory, shared out over its segments. The properties below give one value per token
    and are made anew on every call: statistics need none of them.
    """

    id: TrajectoryId
    segment: int
    turns: tuple[Turn, ...]
    reward: float
    weight: float = 1.0
    first_turn: int = 0

    @property
    def sampled(self) -> int:
        """Number of sampled tokens, the trained ones."""
        return sum([len(turn.token_ids) for turn in self.turns])

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(id for turn in self.turns for id in (*turn.context_ids, *turn.token_ids))

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """True where the token was sampled."""
        return self._spread(False, lambda turn: (True,) * len(turn.token_ids))

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Of the engine, 0.0 where not sampled."""
        return self._spread(0.0, lambda turn: turn.logprobs)

    @property
    def versions(self) -> tuple[int, ...]:
        """Of the weights that sampled each token, -1 where not sampled."""
        return self._spread(-1, lambda turn: (turn.version,) * len(turn.token_ids))

    def _spread(self, filler: V, of: Callable[[Turn], tuple[V, ...]]) -> tuple[V, ...]:
        return tuple(value for turn in self.turns for value in ((filler,) * len(turn.context_ids) + of(turn)))
