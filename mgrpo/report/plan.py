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
from mgrpo.report.words import Line, comparison_lines, loss_lines, reward_lines
from mgrpo.tasks.world import Settings as WorldSettings

# Tokens that a tiny model's vocabulary has beside the words of its tasks: roles and the format's control strings.
_ADDED_TOKENS = {"compact": 14, "hermes": 13}
_TASKS_LOOKED_AT = 64
_ROWS = (
    "Questions and rows are per step. A sub-agent has a row per call, ~ one call for each part of a question; resample"
    " keeps at most d different calls of an attempt."
)


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
    body = [part for title, parts in sections for part in (Text(), Rule(title, align="left"), *parts)]
    return Group(_title(config), *body)


def header(config: Config) -> RenderableType:
    """What a run says of itself at its beginning: who learns what, who is compared with whom, and the losses."""
    compared, loss = _definitions(comparison_lines(config)), _definitions(loss_lines(config))
    titles = (Text("who is compared with whom", style="bold"), Text("loss", style="bold"))
    return Group(_title(config), agents_table(config), titles[0], compared, titles[1], loss, Text())


def _title(config: Config) -> Text:
    stages = ", ".join(f"{stage.name} {stage.steps}" for stage in config.stages)
    return Text(f"{config.name}: preset {config.preset}, seed {config.seed}, steps: {stages}", style="bold")


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
        learns = ", ".join(stages) if stages else "no" if agent.share_weights_with else "no, frozen"
        cells = (name, agent.role, _model(agent), learns, ", ".join(agent.tools) or UNKNOWN, _aligned(agent))
        table.add_row(*map(Text, cells))
    return table


def _model(agent: AgentConfig) -> str:
    if agent.share_weights_with is not None:
        return f"{agent.share_weights_with}'s"
    return "tiny, from scratch" if isinstance(agent.model, TinyModel) else str(agent.model)


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
        losses = dict.fromkeys(config.learner_for(name, stage).policy_loss for name in config.trained(stage))
        cells = (stage.name, str(stage.steps), stage.collect, ", ".join(losses), str(stage.groups_per_step))
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
    if settings_.align == "resample" and stage.collect == "team":
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
        for name in dict.fromkeys(map(config.owner, config.trained(stage))):
            own = config.learner_for(name, stage)
            schedule = f"{own.lr_scheduler}, {own.warmup_steps} steps of warm-up"
            cells = (own.optimizer, f"{own.learning_rate:g}", schedule, f"{own.max_grad_norm:g}")
            table.add_row(*map(Text, (f"{stage.name}/{name}", *cells)))
    return table


# ---------------------------------------------------------------- size


def model_sizes(config: Config) -> dict[str, ModelSize]:
    """By agent that has weights of its own. Raises DataError for a model folder that is not there or not complete."""
    return {name: _size(config, name) for name in config.agents if config.owner(name) == name}


def _size(config: Config, name: str) -> ModelSize:
    agent = config.agents[name]
    if not isinstance(agent.model, TinyModel):
        return folder_size(str(agent.model))
    return tiny_size(agent.model, len(closed_vocabulary(config)) + _ADDED_TOKENS[agent.format])


def memories(config: Config) -> dict[str, Memory]:
    """Bytes by agent; where stages differ, of the one that takes most."""
    sizes = model_sizes(config)
    return {name: max(_in_stages(config, name, own), key=lambda m: m.total) for name, own in sizes.items()}


def _in_stages(config: Config, name: str, own: ModelSize) -> list[Memory]:
    engine = _engine_bytes(config.agents[name])
    learners = _learners(config, name)
    if not learners:
        return [memory(own, None, 0, engine)]
    return [
        memory(own, learner.optimizer, learner.max_tokens_per_microbatch, engine, learner.kl_coef > 0.0)
        for learner in learners
    ]


def _learners(config: Config, owner: str) -> list[LearnerConfig]:
    """How its weights move, in the stages in which they do."""
    trained = [stage for stage in config.stages if not set(config.sharing(owner)).isdisjoint(config.trained(stage))]
    return [config.learner_for(owner, stage) for stage in trained]


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
        learners = _learners(config, name)
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
        ("P", "parameters. Learners compute in float32: weights 4 P (twice with a KL reference), gradients 4 P bytes"),
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
