"""A recipe and its models -> a team that acts. `Team.load(run).ask(question)` uses a trained one from Python."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from mgrpo.agents.chat import Chat
from mgrpo.agents.delegate import Delegate
from mgrpo.agents.formats import FORMATS
from mgrpo.agents.loop import Agent, Limits
from mgrpo.agents.rollout import Team as ActingTeam
from mgrpo.agents.rollout import run_groups
from mgrpo.agents.scheduler import Eager, Lockstep, Scheduler
from mgrpo.config import AgentConfig, Config, TinyModel
from mgrpo.config.registry import Factory, load_object, settings
from mgrpo.config.vocabulary import pieces
from mgrpo.engines.base import Engine, Sampling
from mgrpo.engines.scripted import Scripted
from mgrpo.errors import ConfigError, DataError, EngineLost, EngineTimeout
from mgrpo.run import RunFolder, check_model_folder
from mgrpo.store.base import WeightVersion
from mgrpo.store.weights import WeightStore
from mgrpo.tasks.base import TaskSource
from mgrpo.tasks.expert import Expert, Gold
from mgrpo.tools.base import Tool
from mgrpo.types import Rollout, Task

T = TypeVar("T")


class Team:
    """One chat and one engine for every agent of a recipe.

    ``engines`` and ``tools`` are those of other processes, by owner of the weights and by name; without them they are
    made here, and torch's number of threads is set, which sums depend on.
    """

    def __init__(
        self,
        config: Config,
        models: Mapping[str, Path],
        engines: Mapping[str, Engine] | None = None,
        tools: Mapping[str, Tool] | None = None,
    ) -> None:
        self.config = config
        self.chats = {name: chat_of(models[name], agent.format) for name, agent in config.agents.items()}
        self._remote = engines is not None
        own = engines or {
            name: engine_of(config, name, models[name], self.chats[name])
            for name in config.agents
            if config.owner(name) == name
        }
        self.engines = {name: own[config.owner(name)] for name in config.agents}
        self._experts: dict[int, tuple[Expert, TaskSource]] = {}
        self._tools = tools_of(config) if tools is None else tools
        self._roots: dict[tuple[int, float | None, int], tuple[Agent, Any]] = {}
        self._loaded: dict[str, int] = dict.fromkeys(config.agents, -1)
        self._questions: dict[str, TaskSource] = {}

    @classmethod
    def load(cls, run: str | Path, version: int | None = None) -> Team:
        """The team of a run folder with its newest weights, or every trained agent at ``version``.

        Raises RunFolderError, DataError for a version that is not kept, CheckpointError for a damaged one.
        """
        folder = RunFolder(Path(run))
        config, store = folder.open()
        try:
            team = cls(config, folder.models(config))
            for name in config.learners:
                weights = folder.published(store, name, version)
                complete(team.serve(name, weights, folder.weight_store(config, store.run)))
        finally:
            store.close()
        return team

    async def serve(self, owner: str, weights: WeightVersion | None, place: WeightStore, oldest: int = 0) -> None:
        """Load published weights into their engine, unless it serves them already; None: those it began with.

        Engines of other processes load by themselves: until one of them serves version ``oldest`` or a newer one, they
        are waited for. Raises CheckpointError for damaged weights, EngineTimeout where none came.
        """
        if self._remote:
            await self._wait_for(owner, oldest)
        elif weights is not None and self._loaded[owner] != weights.version:
            folder = place.get(weights.handle, weights.checksum)
            await self.engines[owner].load(weights.version, str(folder))
            self._loaded[owner] = weights.version

    async def wait_for_frozen(self) -> None:
        """Until the engines of weights that never move are there, where they are those of other processes."""
        for owner in self.config.agents if self._remote else ():
            if self.config.owner(owner) == owner and owner not in self.config.learners:
                await self._wait_for(owner, 0)

    async def _wait_for(self, owner: str, version: int) -> None:
        try:
            await self.engines[owner].load(version, "")
        except EngineLost as error:
            raise EngineTimeout(str(error)) from error

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what the engines hold; the team acts no more. Leaving ``with Team.load(run) as team`` does it."""
        for engine in {id(engine): engine for engine in self.engines.values()}.values():
            complete(engine.close())
        for expert, _ in self._experts.values():
            complete(expert.close())

    def acting(
        self, seed: int, temperature: float | None = None, closed_book: bool = False, teacher: Any = None
    ) -> ActingTeam:
        """The team as rollouts need it.

        ``temperature`` overrides the recipe's. ``closed_book`` takes every tool away: the planner answers at once.
        ``teacher`` is a task source whose scripted teacher writes all turns.
        """
        limits = self.config.rollout
        key = (seed, temperature, id(teacher))
        if key not in self._roots:  # made once: chats keep what they know of a tool set
            self._roots[key] = (self._agent(self.config.planner, seed, temperature, teacher), teacher)
        root, _ = self._roots[key]
        if closed_book:
            root = replace(root, tools={}, limits=replace(root.limits, max_turns=0))
        return ActingTeam(root, limits.max_depth, limits.max_calls, limits.rollout_timeout_s, limits.max_retries)

    def ask(self, question: str, task: Task | None = None, temperature: float = 0.0, seed: int = 0) -> Rollout:
        """One rollout on ``question``. ``task`` says in which world it is asked; default: the first test world.

        Raises DataError where the question cannot be asked there, see `obstacle`.
        """
        source = self.questions()
        asked = replace(task or source.task(0), question=question, answer=None)
        if obstacle := self.obstacle(question, asked, source):
            raise DataError(f"{obstacle}; ask for instance: {examples(asked, source)}")
        groups = complete(
            run_groups([(0, asked)], self.acting(seed, temperature), 1, source.corpus, self.scheduler(), seed)
        )
        return groups[0].rollouts[0]

    def questions(self, split: str = "tasks") -> TaskSource:
        """The questions of [evaluation]: ``split`` "tasks" (test) or "dev_tasks"."""
        if split not in self._questions:
            own = getattr(self.config.evaluation, split)
            self._questions[split] = task_source(self.config, own, f"evaluation.{split}")
        return self._questions[split]

    def obstacle(self, question: str, task: Task, source: TaskSource) -> str | None:
        """Why ``question`` cannot be asked in the world of ``task``; None where it can.

        Only models with a closed vocabulary are limited: to its words, and to what their world can answer.
        """
        if not isinstance(self.config.agents[self.config.owner(self.config.planner)].model, TinyModel):
            return None
        chat = self.chats[self.config.planner]
        words = pieces(question)
        unknown = [word for word in words if chat.decode(chat.encode(word)) != word]
        if unknown or not words:
            return f"the models have no word for {', '.join(unknown)}" if unknown else "the question is empty"
        gold = getattr(source, "gold", None)
        if gold is not None and gold(task, question) is None:
            return f"no page of the web of task {task.id} answers {question!r}"
        return None

    def expert(self, source: TaskSource) -> Expert:
        """Who grades the subtasks of ``source``. A rule or judge is one for all sources: one cache, one cost."""
        plan = settings("expert", self.config.expert, "expert")
        key = id(source) if isinstance(plan, Gold | Factory) else 0
        if key not in self._experts:
            self._experts[key] = (plan.build(source=source), source)  # the source too: its id must stay taken
        return self._experts[key][0]

    def scheduler(self) -> Scheduler:
        kind = Lockstep if self.config.scheduler == "lockstep" else Eager
        return kind(self.config.rollout.request_timeout_s)

    def _agent(self, name: str, seed: int, temperature: float | None, teacher: Any) -> Agent:
        config = self.config.agents[name]
        tools: dict[str, Tool] = {}
        for tool in config.tools:
            if tool in self.config.agents:
                tools[tool] = Delegate(self._agent(tool, seed, temperature, teacher), tool)
            else:
                tools[tool] = self._tools[tool]
        engine = self.engines[name] if teacher is None else self._scripted(name, teacher, seed)
        heat = config.temperature if temperature is None else temperature
        sampling = Sampling(heat, seed=seed, top_p=config.top_p, top_k=config.top_k, min_p=config.min_p)
        return Agent(name, self.chats[name], engine, tools, _limits(config), sampling, config.prompt)

    def _scripted(self, name: str, teacher: Any, seed: int) -> Engine:
        script = teacher.teacher(*_part_of(self.config, self.config.agents[name]), seed)
        return Scripted(lambda request: script(request.id, request.messages), self.chats[name].encode_reply)


def _part_of(config: Config, agent: AgentConfig) -> tuple[str, dict[str, str]]:
    """What a scripted teacher plays an agent as, and the skills of the sub-agents that it calls."""
    helpers = {tool: config.agents[tool].skill or "searcher" for tool in agent.tools if tool in config.agents}
    if agent.role == "subagent":
        return agent.skill or "searcher", helpers
    return "planner" if helpers else "solo", helpers


def complete(coroutine: Coroutine[Any, Any, T]) -> T:
    """What ``coroutine`` returns; where a loop is running already, as in a notebook, in a thread with its own loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = []

    async def watched() -> T:
        running.append((asyncio.get_running_loop(), asyncio.current_task()))
        return await coroutine

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(asyncio.run, watched())
        try:
            return result.result()
        except KeyboardInterrupt:  # it arrives in this thread; leaving the block waits for the other
            for loop, task in running:
                if task is not None:
                    loop.call_soon_threadsafe(task.cancel)
            raise


def engine_of(config: Config, owner: str, folder: Path, chat: Chat) -> Engine:
    """The engine of the weights of ``owner``, in this process. Sets torch's number of threads."""
    import torch

    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    plan = settings("engine", config.agents[owner].engine, f"agents.{owner}.engine")
    engine: Engine = plan.build(folder=folder, encode=chat.encode_reply)
    return engine


def examples(task: Task, source: TaskSource, count: int = 3) -> str:
    """Questions to quote that can be asked in the world of ``task``, or the first ones of a source without worlds."""
    like = getattr(source, "like", None)
    tasks = like(task, count) if like is not None else map(source.task, range(min(count, len(source))))
    return " or ".join(f'"{example.question}"' for example in tasks)


def task_source(config: Config, own: Mapping[str, Any], where: str) -> TaskSource:
    """The tasks of [tasks] with the keys of a stage or evaluation on top; ``where`` is that table's key."""
    source: TaskSource = settings("tasks", config.tasks_with(own), where).build(seed=config.seed)
    return source


def tools_of(config: Config) -> dict[str, Tool]:
    """The tools of a recipe by name. Raises ConfigError for a user's object that is no tool."""
    tools: dict[str, Tool] = {}
    for name, table in config.tools.items():
        tool, where = settings("tool", table, f"tools.{name}").build(), f"tools.{name}.type: {table['type']}"
        missing = [part for part in ("name", "description", "parameters", "__call__") if not hasattr(tool, part)]
        if missing:
            raise ConfigError(
                f"{where} gives no tool: it lacks {', '.join(missing)} (see docs/guides/your-own-parts.md)"
            )
        if tool.name != name:
            raise ConfigError(
                f"{where} gives a tool called {tool.name!r}, which is what the model reads; use that name"
            )
        tools[name] = tool
    return tools


def check_parts(config: Config) -> None:
    """Make every part of a recipe that needs no run folder, so that its faults are found before a run begins.

    Raises ConfigError or DataError naming the key or the file.
    """
    tools_of(config)
    for index, stage in enumerate(config.stages):
        source: Any = task_source(config, stage.tasks, f"stages.{index}.tasks")
        if stage.collect == "teacher" and not hasattr(source, "teacher"):
            kind = config.tasks_with(stage.tasks)["type"]
            raise ConfigError(f"stages.{index}.collect: {kind} tasks have no scripted teacher; use collect = 'team'")
        if stage.collect == "teacher":
            for agent in config.agents.values():
                source.teacher(*_part_of(config, agent), config.seed)
        _check_expert(config, source)
    for key in ("tasks", "dev_tasks"):
        task_source(config, getattr(config.evaluation, key), f"evaluation.{key}")
    if config.reward:
        load_object(config.reward, "reward")
    for name, agent in config.agents.items():
        if config.owner(name) == name:
            _check_agent(agent, f"agents.{name}")
    for index, table in enumerate(config.trackers):
        plan = settings("tracker", table, f"trackers.{index}")
        if hasattr(plan, "check"):
            plan.check()


def _check_expert(config: Config, source: TaskSource) -> None:
    expert: Expert = settings("expert", config.expert, "expert").build(source=source)
    missing = [part for part in ("grade", "take_metrics", "close") if not hasattr(expert, part)]
    if missing:
        raise ConfigError(
            f"expert.type: {config.expert['type']} gives no expert: it lacks {', '.join(missing)}; derive it from"
            " mgrpo.tasks.expert.Expert"
        )
    complete(expert.close())


def _check_agent(agent: AgentConfig, where: str) -> None:
    """The model can be read, written to and decoded; a tiny one, which does not exist yet, always can."""
    folder = None
    if isinstance(agent.model, str):
        folder = Path(agent.model)
        check_model_folder(folder, f"{where}.model")
        try:
            chat_of(folder, agent.format)
        except ConfigError as error:
            raise ConfigError(f"{where}: {agent.model} and format {agent.format!r}: {error}") from error
    plan = settings("engine", agent.engine, f"{where}.engine")
    if hasattr(plan, "check"):
        try:
            plan.check(folder)
        except ConfigError as error:
            raise ConfigError(f"{where}.engine: {error}") from error


def _limits(config: AgentConfig) -> Limits:
    return Limits(
        max_turns=config.max_turns,
        max_tokens_per_turn=config.max_tokens_per_turn,
        max_context=config.max_context,
        max_parallel_tool_calls=config.max_parallel_tool_calls,
        max_tool_response_tokens=config.max_tool_response_tokens,
        truncate_side=config.tool_response_truncate_side,
    )


def chat_of(folder: Path, format: str) -> Chat:
    """The chat of the model in ``folder``. Raises DataError naming the folder, ConfigError as `Chat` does."""
    ends: set[int] = set()
    for file in ("config.json", "generation_config.json"):  # released chat models declare several ends of a turn
        try:
            declared = json.loads((folder / file).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError):
            continue
        ends |= set(declared if isinstance(declared, list) else [declared])
    return Chat(tokenizer_of(folder), FORMATS[format], ends - {None})


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer in a model folder. Raises DataError naming the folder."""
    from transformers import AutoTokenizer

    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):  # transformers would make an empty one up
        raise DataError(f"model folder {folder}: no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); copy it there")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(f"model folder {folder}: no tokenizer: {str(error).splitlines()[0]}") from error
