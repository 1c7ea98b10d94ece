"""What a recipe means, before anything runs: who learns what from whom, by which formulas, and what it takes."""

from __future__ import annotations

from io import StringIO
from statistics import fmean

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from mgrpo.config import AgentConfig, Config, LearnerConfig, StageConfig, TinyModel
from mgrpo.config.registry import settings
from mgrpo.config.vocabulary import closed_vocabulary
from mgrpo.report.model_size import Memory, ModelSize, folder_size, memory, tiny_size, version_bytes
from mgrpo.report.notation import UNKNOWN, short, size
from mgrpo.tasks.world import Settings as WorldSettings

# Tokens that a tiny model's vocabulary has beside the words of its tasks: roles and the format's control strings.
_ADDED_TOKENS = {"compact": 14, "hermes": 13}
_TASKS_LOOKED_AT = 64
_ROWS = (
    "Questions and rows are per step. A sub-agent has a row per call, ~ one call for each part of a question; resample"
    " keeps at most d different calls of an attempt."
)

Line = tuple[str, str]  # a term and what it means


def plan(config: Config) -> RenderableType:
    """A renderable for a Rich console. Raises DataError for a model folder that is not there, ConfigError where a tiny
    model has no closed vocabulary."""
    sections: tuple[tuple[str, list[RenderableType]], ...] = (
        ("Who learns what", [agents_table(config)]),
        ("Stages", [stages_table(config), Text(_ROWS, style="dim"), Text(), learners_table(config)]),
        ("Rewards", [_definitions(reward_lines(config))]),
        ("Who is compared with whom", [_definitions(comparison_lines(config))]),
        ("Loss", [_definitions(loss_lines(config))]),
        ("Size and memory", [memory_table(config), _definitions(memory_lines(config))]),
    )
    head = Text(f"{config.name}: preset {config.preset}, seed {config.seed}", style="bold")
    body = [part for title, parts in sections for part in (Text(), Rule(title, align="left"), *parts)]
    return Group(head, *body)


def plan_text(config: Config, width: int = 120) -> str:
    """`plan` as plain lines."""
    file = StringIO()
    console = Console(file=file, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(plan(config))
    return "\n".join(row.rstrip() for row in file.getvalue().splitlines())


# ---------------------------------------------------------------- tables


def agents_table(config: Config) -> Table:
    table = _table("agent", "role", "model", "learns", "tools and sub-agents", "compares")
    for name, agent in config.agents.items():
        stages = [stage.name for stage in config.stages if name in config.trained(stage)]
        learns = ", ".join(stages) if stages else "no, frozen"
        model = "tiny, from scratch" if isinstance(agent.model, TinyModel) else agent.model
        table.add_row(*map(Text, (name, agent.role, model, learns, ", ".join(agent.tools) or UNKNOWN, _aligned(agent))))
    return table


def _aligned(agent: AgentConfig) -> str:
    if agent.role == "planner":
        return f"K = {agent.num_generations or 8}"
    d = "" if agent.align in (None, "none") else f"d = {agent.trajectories_per_rollout}, "
    return f"{d}align {agent.align or 'none'}"


def stages_table(config: Config) -> Table:
    rows = [f"rows {name}" for name in config.agents]
    table = _table("stage", "steps", "by", "loss", "questions", "K", *rows)
    for stage in config.stages:
        expected = [_rows_in_words(config, stage, name) for name in config.agents]
        cells = (stage.name, str(stage.steps), stage.collect, stage.policy_loss, str(stage.groups_per_step))
        table.add_row(*map(Text, (*cells, str(config.num_generations(stage)), *expected)))
    return table


def expected_rows(config: Config, stage: StageConfig, agent: str) -> float | None:
    """Rows that ``agent`` learns from in one step of ``stage``: 0 where it does not learn, None where it depends on
    calls that nothing in the recipe tells."""
    if agent not in config.trained(stage):
        return 0
    rollouts = stage.groups_per_step * config.num_generations(stage)
    settings_ = config.agents[agent]
    if settings_.role == "planner":
        return rollouts
    calls = _calls(config, stage)
    if calls is None:
        return None
    if settings_.align == "resample" and stage.policy_loss == "ppo":
        calls = [min(made, settings_.trajectories_per_rollout or made) for made in calls]
    return rollouts * fmean(calls)


def _rows_in_words(config: Config, stage: StageConfig, agent: str) -> str:
    rows = expected_rows(config, stage, agent)
    if rows is None:
        return "by calls"
    exact = config.agents[agent].role == "planner" or not rows
    return f"{rows:.0f}" if exact else f"~{rows:.0f}"


def _calls(config: Config, stage: StageConfig) -> list[int] | None:
    """Number of parts of the first questions, which is how often a good planner delegates to its one sub-agent."""
    tasks = settings("tasks", config.tasks_with(stage.tasks), f"stages.{stage.name}.tasks")
    if len(config.subagents) != 1 or not isinstance(tasks, WorldSettings):
        return None
    source = tasks.build(seed=config.seed)
    notes = (source.task(index).info["Annotator Metadata"] for index in range(_TASKS_LOOKED_AT))
    return [int(note["Number of steps"]) for note in notes]


def learners_table(config: Config) -> Table:
    table = _table("learner", "optimizer", "learning rate", "schedule", "gradient norm <=")
    for stage in config.stages:
        for name in config.trained(stage):
            own = config.learner_for(name, stage)
            schedule = f"{own.lr_scheduler}, {own.warmup_steps} steps of warm-up"
            cells = (own.optimizer, f"{own.learning_rate:g}", schedule, f"{own.max_grad_norm:g}")
            table.add_row(*map(Text, (f"{stage.name}/{name}", *cells)))
    return table


# ---------------------------------------------------------------- words and symbols


def reward_lines(config: Config) -> list[Line]:
    if config.reward is not None:
        return [("R", f"by your function {config.reward}(rollout, grades, weights, unknown)")]
    lines = []
    for name, agent in config.agents.items():
        terms = " + ".join(f"{weight:g} {term}" for term, weight in (agent.reward_weights or {}).items())
        equation = "equation 4" if agent.role == "planner" else "equation 5"
        lines.append((f"R({name})", f"{terms} if every turn parses and it answers, else 0 ({equation})"))
    unknown = "its weight is shared out over" if config.rollout.unknown_reward == "renormalise" else "it excludes"
    what = "the known terms" if config.rollout.unknown_reward == "renormalise" else "the trajectory"
    meaning = (
        "correct: the answer against the gold; correct_main: the planner's, copied; expert: the sub-answer's grade."
    )
    return [*lines, ("terms", f"{meaning} A term that nobody could grade is unknown, not 0: {unknown} {what}.")]


def comparison_lines(config: Config) -> list[Line]:
    lines = []
    for name, agent in config.agents.items():
        stages = [stage for stage in config.stages if name in config.trained(stage) and stage.policy_loss == "ppo"]
        ways = dict.fromkeys((config.num_generations(s), config.learner_for(name, s).scale_rewards) for s in stages)
        lines += [(name, _compared(agent, k, scale)) for k, scale in ways]
        if not ways:
            lines.append((name, "nobody; it does not learn from rewards."))
    return [*lines, ("never", "across questions, and never across agents. Equal rewards give advantage 0.")]


def _compared(agent: AgentConfig, k: int, scale: str) -> str:
    scaled = scale == "group"
    formula = "A = (R - mu) / sigma" if scaled else "A = R - mu"
    if agent.role == "subagent":
        text = f"all its calls in the {k} attempts at one question, with each other; {_counts(agent)}."
        equation = "and population sigma (equation 13)" if scaled else "(equation 13 without sigma)"
        return f"{text} {formula} with so weighted mu {equation}."
    equation = ", population sigma (equation 10)" if scaled else " (equation 10 without sigma)"
    return f"its {k} attempts at one question, with each other. {formula}{equation}."


def _counts(agent: AgentConfig) -> str:
    d = agent.trajectories_per_rollout
    return {
        "weight": f"a call of an attempt with d_k calls counts {d}/d_k, so that every attempt counts {d}",
        "resample": f"calls are duplicated or dropped at random to {d} per attempt",
        "none": "every call counts 1, so that attempts with many calls count more",
        None: "every call counts 1",
    }[agent.align]


def loss_lines(config: Config) -> list[Line]:
    """The formula of every agent, with the recipe's numbers in its denominators; stages with the same one together."""
    lines: list[Line] = []
    for name in config.agents:
        stages: dict[tuple[str, str], list[str]] = {}
        for stage in config.stages:
            if name in config.trained(stage):
                own = config.learner_for(name, stage)
                key = (_objective(stage, own), _coefficient(config, stage, name, own))
                stages.setdefault(key, []).append(stage.name)
        for (objective, coefficient), names in stages.items():
            lines += [(f"{name} in {', '.join(names)}", f"loss = - sum of c {objective}"), ("", coefficient)]
    legend = "r = pi / pi_old per token, pi_old is the policy that sampled it. Sums run over all sampled tokens of the"
    sums = "agent in the whole step, however it is split into micro-batches; a trajectory of unknown reward is in none."
    return [*lines, ("", f"{legend} {sums}")]


def _objective(stage: StageConfig, own: LearnerConfig) -> str:
    if stage.policy_loss == "sft":
        return "log pi"
    return f"min(r A, clip(r, {1 - own.clip_ratio_low:g}, {1 + own.clip_ratio_high:g}) A)"


def _coefficient(config: Config, stage: StageConfig, name: str, own: LearnerConfig) -> str:
    agent = config.agents[name]
    attempts = stage.groups_per_step * config.num_generations(stage)
    d = agent.trajectories_per_rollout or 1
    if agent.role == "planner":
        weight, total = "w = 1", f"{attempts} (attempts)"
    elif agent.align == "none" or stage.policy_loss == "sft":  # demonstrations are not aligned
        weight, total = "w = 1", "number of its calls"
    else:
        weight = f"w = {d}/d_k" if agent.align == "weight" else "w = times drawn"
        total = f"{attempts} x {d} = {attempts * d}, less {d} for each attempt without a call"
    formulas = {
        "seq-mean-token-mean": f"c = w / (n W), {weight}, n = sampled tokens of its trajectory, W = sum of w = {total}",
        "seq-mean-token-sum": f"c = w / W, {weight}, W = sum of w = {total}",
        "token-mean": f"c = w / W, {weight}, W = sum of w over all sampled tokens",
    }
    return f"{own.loss_agg_mode}: {formulas[own.loss_agg_mode]}"


# ---------------------------------------------------------------- size


def model_sizes(config: Config) -> dict[str, ModelSize]:
    """By agent. Raises DataError for a model folder that is not there or not complete."""
    return {name: _size(config, name) for name in config.agents}


def _size(config: Config, name: str) -> ModelSize:
    agent = config.agents[name]
    if not isinstance(agent.model, TinyModel):
        return folder_size(agent.model)
    return tiny_size(agent.model, len(closed_vocabulary(config)) + _ADDED_TOKENS[agent.format])


def memories(config: Config) -> dict[str, Memory]:
    """Bytes by agent; where stages differ, of the one that takes most."""
    sizes = model_sizes(config)
    return {name: max(_in_stages(config, name, own), key=lambda m: m.total) for name, own in sizes.items()}


def _in_stages(config: Config, name: str, own: ModelSize) -> list[Memory]:
    engine = _engine_bytes(config.agents[name])
    learners = [config.learner_for(name, stage) for stage in config.stages if name in config.trained(stage)]
    if not learners:
        return [memory(own, None, 0, engine)]
    return [memory(own, learner.optimizer, learner.max_tokens_per_microbatch, engine) for learner in learners]


def _engine_bytes(agent: AgentConfig) -> int:
    """Per number; an engine in another process takes nothing here."""
    if agent.engine.get("type") != "local":
        return 0
    return {"float32": 4, "bfloat16": 2}[settings("engine", agent.engine, "engine").dtype]


def memory_table(config: Config) -> Table:
    table = _table("agent", "P", "weights", "gradients", "optimizer", "activations", "engine", "sum", "disk")
    sizes = model_sizes(config)
    for name, own in memories(config).items():
        parts = (own.weights, own.gradients, own.optimizer, own.activations, own.engine, own.total)
        learners = [config.learner_for(name, stage) for stage in config.stages if name in config.trained(stage)]
        disk = max((version_bytes(sizes[name], learner.optimizer) for learner in learners), default=0)
        table.add_row(Text(name), short(sizes[name].parameters), *map(size, parts), size(disk))
    return table


def memory_lines(config: Config) -> list[Line]:
    sizes = model_sizes(config)
    widths = {name: _engine_bytes(config.agents[name]) for name in sizes}
    cache = [f"{name} {size(2 * widths[name] * own.layers * own.kv_width)}" for name, own in sizes.items()]
    layer = "6 hidden + 2 attention + 2 key-value + 4 intermediate widths"
    return [
        ("sum", f"{size(sum(m.total for m in memories(config).values()))} for all agents, if all run in one process"),
        ("P", "parameters. Learners compute in float32: weights 4 P, gradients 4 P bytes"),
        ("optimizer", "AdamW 8 P; Muon 4 bytes for each number of a layer's matrix and AdamW for the rest"),
        ("activations", f"of one micro-batch at most: 4 tokens (layers ({layer}) + 3 vocabulary) bytes"),
        ("engine", f"its own copy in its dtype; its cache comes on top, per token of context: {', '.join(cache)}"),
        ("disk", f"of one version, weights and optimizer; the newest {config.keep_versions} of each agent are kept"),
    ]


def _definitions(lines: list[Line]) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column()
    for term, meaning in lines:
        table.add_row(Text(term), Text(meaning))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column)
    return table
