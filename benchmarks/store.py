"""What durability and orchestration cost: commits, takes from a large store, and turns of many rollouts at once.

    python benchmarks/store.py [--store URL] [--trajectories 1000000] [--quick] [--json FILE]

Three questions, each beside its floor in the same run, with the groups of sample_groups.py:

    commit_ratio   commits of trajectories of 1,000 tokens, one group in each, as a share of the throughput of a bare
                   executemany of the very same records into a bare table of the same database, with as many
                   transactions and the same durability                                           wanted: >= 0.5
    take_ratio     latency of take() for one group among --trajectories (64 tokens each), over that among 10,000
                                                                                                  wanted: <= 1.5
    turn_ms_N      processor milliseconds per turn with a scripted engine, N rollouts at once     wanted: <= 1, and
                   flat within 20 % from N = 10 to N = 2,000

Both sides of a ratio alternate, and medians are shown. The large store begins as commits and is then copied into itself
within the database, so that loading takes seconds: keys are its own, records repeat. ``--store`` names a PostgreSQL
database, in which the benchmark makes schemas of its own and drops them, or a SQLite file, beside which it makes and
removes others; the default is SQLite in a temporary folder. Exit code 1 where what is wanted was missed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from sample_groups import CALLS, PER_GROUP, K, Rewards, Writer, numbered
from sqlalchemy import Engine, create_engine, insert, make_url, select, text

from mgrpo.agents.chat import Chat
from mgrpo.agents.delegate import Delegate
from mgrpo.agents.formats import Compact
from mgrpo.agents.loop import Agent
from mgrpo.agents.rollout import Team, run_groups
from mgrpo.agents.scheduler import Lockstep
from mgrpo.engines.base import Request
from mgrpo.engines.scripted import Scripted
from mgrpo.policy.tiny import create_tokenizer
from mgrpo.store import rows, schema
from mgrpo.store.base import RunInfo, Store
from mgrpo.store.opening import open_store
from mgrpo.tools.base import CallContext
from mgrpo.types import Group, Task, ToolResult

SMALL_STORE = 10_000  # trajectories
CONCURRENCY = (10, 200, 2_000)  # rollouts at once
DRIVER = "postgresql+psycopg"
STDERR = Console(stderr=True)


@dataclass(frozen=True)
class Sizes:
    """How much is done. ``warm`` repeats do not count; ``rollouts`` are per repeat and concurrency."""

    warm: int
    repeats: int
    commits: int
    takes: int
    rollouts: int


FULL, QUICK = Sizes(1, 7, 40, 200, 2_000), Sizes(0, 1, 3, 5, 20)


# ---------------------------------------------------------------- stores of its own


@contextmanager
def fresh_store(base: str | None, name: str) -> Iterator[tuple[str, Store]]:
    """A new store and its URL: a SQLite file in a folder of its own, or a schema of the database ``base``."""
    parsed = make_url(base or "sqlite://")
    with ExitStack() as stack:
        if parsed.get_backend_name() == "sqlite":
            place = Path(parsed.database).parent if parsed.database else None
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mgrpo-store-", dir=place))
            url = f"sqlite:///{folder}/{name}.db"
        else:
            schema_name = f"benchmark_{name}_{os.getpid()}"
            run_sql(str(base), f"CREATE SCHEMA {schema_name}")
            stack.callback(run_sql, str(base), f"DROP SCHEMA {schema_name} CASCADE")
            query = {"options": f"-csearch_path={schema_name}"}
            url = parsed.update_query_dict(query).render_as_string(hide_password=False)
        store = open_store(url, RunInfo(0))
        stack.callback(store.close)
        yield url, store


def engine_of(url: str) -> Engine:
    parsed = make_url(url)
    return create_engine(parsed if parsed.get_backend_name() == "sqlite" else parsed.set(drivername=DRIVER))


def run_sql(url: str, statement: str) -> None:
    engine = engine_of(url)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(statement))
    engine.dispose()


# ---------------------------------------------------------------- commits


class Bare:
    """A table of records and nothing else, over the database's own driver, as durable as the store."""

    def __init__(self, url: str) -> None:
        parsed = make_url(url)
        if parsed.get_backend_name() == "sqlite":
            self._connection: Any = sqlite3.connect(parsed.database or "", isolation_level=None)
            for pragma in ("synchronous=FULL", "wal_autocheckpoint=4096"):
                self._connection.execute(f"PRAGMA {pragma}")
            kinds, mark = ("INTEGER", "BLOB"), "?"
        else:
            import psycopg

            plain = parsed.set(drivername="postgresql").render_as_string(hide_password=False)
            self._connection = psycopg.connect(plain, autocommit=True)
            kinds, mark = ("BIGINT", "BYTEA"), "%s"
        self._connection.execute(f"CREATE TABLE bare (id {kinds[0]} PRIMARY KEY, record {kinds[1]} NOT NULL)")
        self._insert = f"INSERT INTO bare VALUES ({mark}, {mark})"

    def write(self, records: Sequence[tuple[int, bytes]]) -> None:
        cursor = self._connection.cursor()
        cursor.execute("BEGIN")
        cursor.executemany(self._insert, records)
        cursor.execute("COMMIT")

    def close(self) -> None:
        self._connection.close()


def records_of(group: Group, rewards: Rewards) -> list[tuple[int, bytes]]:
    """What `commit` writes of a group, by a number that no other record has."""
    own = [rows.group_row(group, 0.0), *rows.trajectory_rows(group, rewards)]
    return [(group.id * 100 + i, row["record"]) for i, row in enumerate(own)]


def measure_commits(base: str | None, sizes: Sizes) -> dict[str, Any]:
    writer = Writer(turns=4, context=186, sampled=64)
    made = [writer.group(id) for id in range(8)]
    totals, size = [], 0
    with fresh_store(base, "commits") as (url, store), closing(Bare(url)) as bare:
        for repeat in track(range(sizes.warm + sizes.repeats), "commits", console=STDERR):
            ours = floor = used = 0.0
            for id in range(repeat * sizes.commits, (repeat + 1) * sizes.commits):
                group, rewards = numbered(made[id % len(made)], id)
                records = records_of(group, rewards)
                size = sum(len(record) for _, record in records)
                cpu = time.process_time()
                ours += timed(lambda: store.commit([group], rewards))  # noqa: B023
                used += time.process_time() - cpu
                floor += timed(lambda: bare.write(records))  # noqa: B023
            totals.append((ours, floor, used))
    rest = totals[sizes.warm :]
    ours, floor, used = (1000 * statistics.median(column) / sizes.commits for column in zip(*rest, strict=True))
    ratio = statistics.median(bare / own for own, bare, _ in rest)
    return {
        "commit_ratio": ratio,
        "commit_ms": ours,
        "commit_cpu_ms": used,
        "bare_ms": floor,
        "commit_bytes": size,
    }


def timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


# ---------------------------------------------------------------- takes


def fill(store: Store, count: int) -> int:
    """Commit groups of short trajectories, ``count`` trajectories or a few more; returns the number of groups."""
    writer = Writer(turns=2, context=12, sampled=20)
    made = [writer.group(id) for id in range(20)]
    number = -(-count // PER_GROUP)
    for start in range(0, number, 50):
        several = [numbered(made[id % len(made)], id) for id in range(start, min(start + 50, number))]
        store.commit([group for group, _ in several], {k: v for _, rewards in several for k, v in rewards.items()})
    return number


def grow(url: str, groups: int, wanted: int) -> None:
    """Copy the first groups of a store to further ids until there are ``wanted``, inside the database."""
    engine = engine_of(url)
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("PRAGMA synchronous=OFF")
        while groups < wanted:
            copied = min(groups, wanted - groups)
            for table, key in ((schema.groups, "id"), (schema.trajectories, "group_id")):
                columns = [column + groups if column.name == key else column for column in table.c]
                copy = select(*columns).where(table.c[key] < copied).order_by(*table.primary_key.columns)
                connection.execute(insert(table).from_select([c.name for c in table.c], copy))
            connection.commit()
            groups += copied
    engine.dispose()
    # What a database does by itself, sooner or later, while a run goes on.
    run_sql(url, "PRAGMA wal_checkpoint(TRUNCATE)" if engine.dialect.name == "sqlite" else "ANALYZE")


def measure_takes(base: str | None, sizes: Sizes, trajectories: int) -> dict[str, Any]:
    draw = random.Random(0)
    medians: list[tuple[float, float]] = []
    with fresh_store(base, "small") as (small_url, small), fresh_store(base, "large") as (large_url, large):
        counts = {"small": fill(small, min(SMALL_STORE, trajectories)), "large": -(-trajectories // PER_GROUP)}
        grow(small_url, counts["small"], counts["small"])
        with STDERR.status(f"loading {trajectories:,} trajectories"):
            grow(large_url, fill(large, min(SMALL_STORE, trajectories)), counts["large"])
        for _ in track(range(sizes.warm + sizes.repeats), "takes", console=STDERR):
            own: dict[str, list[float]] = {"small": [], "large": []}
            for _ in range(sizes.takes):
                for name, store in (("small", small), ("large", large)):
                    group = draw.randrange(counts[name])
                    own[name].append(timed(lambda: take_one(store, group)))  # noqa: B023
            medians.append((statistics.median(own["small"]), statistics.median(own["large"])))
    pairs = medians[sizes.warm :]
    return {
        "take_ratio": statistics.median(many / few for few, many in pairs),
        "take_small_ms": 1000 * statistics.median(few for few, _ in pairs),
        "take_large_ms": 1000 * statistics.median(many for _, many in pairs),
        "small_trajectories": counts["small"] * PER_GROUP,
        "large_trajectories": counts["large"] * PER_GROUP,
    }


def take_one(store: Store, group: int) -> None:
    shares = store.take("searcher", group, 1)
    assert shares is not None and len(shares[0].samples) == K * CALLS


# ---------------------------------------------------------------- turns

WORDS = [f"w{i}" for i in range(1000)]


class Lookup:
    """A search that costs nothing: forty words that depend on the query."""

    name, description = "search", "finds things"
    parameters: Mapping[str, Any] = {"type": "object", "properties": {"query": {"type": "string"}}}

    async def __call__(self, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        return ToolResult(words(40, context.id.group, context.id.rollout, context.id.invocation, context.turn))


def words(count: int, *seed: int) -> str:
    start, step = hash(seed) % len(WORDS), 1 + hash(seed[::-1]) % 97
    return " ".join([WORDS[(start + i * step) % len(WORDS)] for i in range(count)])


def plan(request: Request) -> str:
    """Two delegations at once, then the answer."""
    if any(message.role == "assistant" for message in request.messages):
        return "<answer> w1 </answer>"
    return " ".join(
        f"<call> searcher {words(4, request.id.group, request.id.rollout, i)} </call>" for i in range(CALLS)
    )


def look(request: Request) -> str:
    """Two searches in turn, then the answer."""
    turn = sum(message.role == "assistant" for message in request.messages)
    if turn == 2:
        return "<answer> w2 <source> w3 </answer>"
    return f"<call> search {words(3, request.id.group, request.id.rollout, request.id.invocation, turn)} </call>"


def scripted_team() -> Team:
    controls = ("<call>", "</call>", "<answer>", "</answer>", "<arg>", "<source>", "<evidence>")
    chat = Chat(create_tokenizer([*WORDS, "answer", "now", "search", "searcher"], controls), Compact())
    searcher = Agent("searcher", chat, Scripted(look, chat.encode_reply), {"search": Lookup()})
    planner = Agent("planner", chat, Scripted(plan, chat.encode_reply), {"searcher": Delegate(searcher)})
    return Team(planner)


def run_rollouts(team: Team, total: int, at_once: int, first: int) -> int:
    """``total`` rollouts, ``at_once`` of them at a time; returns the number of turns."""

    async def main() -> int:
        turns = 0
        for start in range(first, first + total, at_once):
            ids = range(start, start + at_once, 10)
            tasks = [(id, Task(str(id), words(8, id))) for id in ids]
            groups = await run_groups(tasks, team, 10, lambda task: None, Lockstep())
            turns += sum(len(t.turns) for g in groups for r in g.rollouts for t in r.trajectories)
        return turns

    return asyncio.run(main())


def measure_turns(sizes: Sizes) -> dict[str, Any]:
    team = scripted_team()
    found: dict[int, list[float]] = {n: [] for n in CONCURRENCY}
    for repeat in track(range(sizes.warm + sizes.repeats), "turns", console=STDERR):
        for i, at_once in enumerate(CONCURRENCY):
            total = max(sizes.rollouts, at_once)
            first = (repeat * len(CONCURRENCY) + i) * 1_000_000  # nothing that an earlier repeat left in a cache
            gc.collect()
            started = time.process_time()
            turns = run_rollouts(team, total, at_once, first)
            found[at_once].append(1000 * (time.process_time() - started) / turns)
    return {f"turn_ms_{n}": statistics.median(own[sizes.warm :]) for n, own in found.items()}


# ---------------------------------------------------------------- output


def show(found: Mapping[str, Any], where: str) -> None:
    table = Table(title=f"{where}; medians of {found['repeats']}", title_justify="left")
    table.add_column("what")
    for column in ("here", "floor or fewest", "ratio", "wanted"):
        table.add_column(column, justify="right")
    size = found["commit_bytes"] / 1e6
    table.add_row(
        f"commit {PER_GROUP} x 1,000 tokens, {size:.2f} MB",
        f"{found['commit_ms']:.2f} ms ({found['commit_cpu_ms']:.2f} CPU)",
        f"{found['bare_ms']:.2f} ms",
        f"{found['commit_ratio']:.2f}",
        ">= 0.5",
    )
    few, many = (f"{found[f'take_{name}_ms']:.2f} ms" for name in ("small", "large"))
    what = f"take a group of {found['large_trajectories']:,} trajectories, of {found['small_trajectories']:,}"
    table.add_row(what, many, few, f"{found['take_ratio']:.2f}", "<= 1.5")
    fewest = found[f"turn_ms_{CONCURRENCY[0]}"]
    for n in CONCURRENCY:
        own = found[f"turn_ms_{n}"]
        cells = (f"{own:.3f} ms CPU", f"{fewest:.3f} ms CPU", f"{own / fewest:.2f}")
        table.add_row(f"a turn, {n:,} rollouts at once", *cells, "<= 1.2, 1 ms")
    Console(width=130).print(table)


def missed(found: Mapping[str, Any]) -> list[str]:
    """What these numbers miss, in words."""
    turns = [found[f"turn_ms_{n}"] for n in (CONCURRENCY[0], CONCURRENCY[-1])]
    bounds = {
        f"commit_ratio is {found['commit_ratio']:.2f}, not >= 0.5": found["commit_ratio"] >= 0.5,
        f"take_ratio is {found['take_ratio']:.2f}, not <= 1.5": found["take_ratio"] <= 1.5,
        f"turns cost {turns[0]:.3f} and {turns[1]:.3f} ms, not within 20 % of each other": turns[1] <= 1.2 * turns[0],
        f"a turn costs {max(turns):.2f} ms, not <= 1": max(turns) <= 1.0,
    }
    return [fault for fault, kept in bounds.items() if not kept]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", metavar="URL", help="a database; default: SQLite in a temporary folder")
    parser.add_argument("--trajectories", type=int, default=1_000_000, help="in the large store")
    parser.add_argument("--quick", action="store_true", help="a few of everything: shows that it runs, not how fast")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    options = parser.parse_args()
    if options.trajectories < PER_GROUP:
        parser.error(f"--trajectories must be at least {PER_GROUP}")
    sizes = QUICK if options.quick else FULL
    found: dict[str, Any] = {"repeats": sizes.repeats}
    found |= measure_commits(options.store, sizes)
    found |= measure_takes(options.store, sizes, options.trajectories)
    found |= measure_turns(sizes)
    where = make_url(options.store or "sqlite://").get_backend_name()
    show(found, where)
    if options.json:
        found["store"] = where
        found["machine"] = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    faults = missed(found)
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())
