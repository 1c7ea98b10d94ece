"""Kill -9 any part of a run at any moment, again and again: nothing is lost, nothing is trained twice.

    python benchmarks/chaos.py [--kills 1000] [--store URL | --store postgres] [--seed 0] [--json FILE]

Rounds of a small run (chaos_recipe.py) in separate processes under the real supervisor: two engine servers for each of
two agents, a tool server, two collectors, two learners. While it lasts, a part chosen at random gets SIGKILL every so
often; now and then one gets SIGSTOP and, after its lease may have run out, SIGCONT. A run that is complete is checked
(chaos_checks.py), and the next round begins. Rounds alternate between synchronous (max_staleness 0) and overlapping (1)
collection and learning. Parts do everything but compute: engines follow a script and learners count (chaos_parts.py),
so that a restart takes a fraction of a second; chaos_forks.py says how.

Without --store, SQLite in a temporary folder. A URL names a PostgreSQL database, where each round has a schema of its
own for as long as this runs; its password comes from the environment (PGPASSWORD, ~/.pgpass). ``postgres`` starts a
server of its own, where its programs are installed, and stops and kills that as well.

"Its kind goes on" counts from a kill until any part of the kind (and agent) achieves something: a commit, a
publication, a turn, a call; "it goes on" until the killed part itself does. Exit code 1 where anything was lost,
duplicated or wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from chaos_checks import notes
from chaos_forks import Nursery
from chaos_rounds import KINDS, Kill, Round, begin, disturbed, kill_at_random, nursery
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sqlalchemy import make_url

from mgrpo.config.windows import total_groups

KILLS = 50  # in a round
OUTAGE_GAP_S = 8.0  # between two ends of the database server, on average
# What a part of each kind has achieved when it is at work again.
ACHIEVED = {"collect": "commit", "learn": "publish", "engine": "turns", "tools": "lookup"}


# ---------------------------------------------------------------- how long until it goes on


def recoveries(round: Round) -> dict[str, list[tuple[float, float]]]:
    """By kind, for every kill: seconds until its kind (of the same agent) achieved something again, and until the part
    itself did; only where there was something left to achieve."""
    told = notes(round.folder)
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for kill in round.kills:
        stem = kill.part if kill.kind == "learn" else kill.part.rpartition("-")[0]
        alike = [n["time"] for part, own in told.items() if part.startswith(stem) for n in own if _after(n, kill)]
        itself = [n["time"] for n in told.get(kill.part, ()) if _after(n, kill)]
        if itself:
            found[kill.kind].append((min(alike) - kill.time, min(itself) - kill.time))
    return found


def _after(note: Mapping[str, Any], kill: Kill) -> bool:
    return bool(note["time"] > kill.time and note["pid"] != kill.pid and note["what"] == ACHIEVED[kill.kind])


def result_of(rounds: Sequence[Round], store: str) -> dict[str, Any]:
    """All rounds together, for people and for JSON."""
    times = [recoveries(round) for round in rounds]
    by_kind = {kind: [pair for found in times for pair in found[kind]] for kind in KINDS}
    every = [pair for pairs in by_kind.values() for pair in pairs]
    killed = Counter(kill.kind for round in rounds for kill in round.kills)
    told = {
        what: sum(round.findings.told[what] for round in rounds) for round in rounds for what in round.findings.told
    }
    return {
        "store": store,
        "kills": sum(killed.values()),
        "lost": sum(len(round.findings.lost) for round in rounds),
        "duplicated": sum(len(round.findings.duplicated) for round in rounds),
        "wrong": sum(len(round.findings.wrong) for round in rounds),
        **_seconds(every),
        "pauses": sum(round.pauses for round in rounds),
        "outages": sum(len(round.outages) for round in rounds),
        "rounds": len(rounds),
        "groups": sum(total_groups(round.config) for round in rounds),
        "seconds": sum(round.seconds for round in rounds),
        "by_kind": {kind: {"kills": killed[kind], **_seconds(by_kind[kind])} for kind in KINDS},
        "other_deaths": [death for round in rounds for death in round.deaths],
        "faults": [line for r in rounds for line in (*r.findings.lost, *r.findings.duplicated, *r.findings.wrong)],
        "told": told,
        "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
    }


def _seconds(pairs: Sequence[tuple[float, float]]) -> dict[str, float | None]:
    kind, part = ([pair[i] for pair in pairs] for i in (0, 1))
    return {
        "recover_median_s": _rounded(statistics.median(kind)) if kind else None,
        "recover_max_s": _rounded(max(kind, default=None)),
        "part_median_s": _rounded(statistics.median(part)) if part else None,
        "part_max_s": _rounded(max(part, default=None)),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def show(result: Mapping[str, Any], console: Console) -> None:
    table = Table(title=f"{result['store']}: {result['kills']} kills in {result['rounds']} rounds")
    for heading in ("part", "kills", "lost", "duplicated", "its kind goes on", "longest", "it goes on", "longest"):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    for kind, own in result["by_kind"].items():
        table.add_row(kind, str(own["kills"]), "", "", *_cells(own))
    found = [str(result[key]) for key in ("kills", "lost", "duplicated")]
    table.add_row("all", *found, *_cells(result), style="bold")
    console.print(table)
    console.print(
        f"{result['groups']} groups in {result['seconds']:.0f} s; {result['pauses']} parts suspended for a while;"
        f" {result['outages']} outages of the database;"
        f" {result['wrong']} other faults; {len(result['other_deaths'])} deaths that no kill caused; "
        + ", ".join(f"{what}: {count}" for what, count in result["told"].items())
    )
    for line in (*result["faults"], *result["other_deaths"]):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def line_of(number: int, round: Round) -> str:
    found = round.findings
    faults = f"{len(found.lost)} lost, {len(found.duplicated)} duplicated, {len(found.wrong)} other faults"
    staleness = f"max_staleness {round.config.max_staleness}"
    return f"round {number}, {staleness}: {len(round.kills)} kills in {round.seconds:.0f} s, {faults}"


def _cells(own: Mapping[str, Any]) -> list[str]:
    keys = ("recover_median_s", "recover_max_s", "part_median_s", "part_max_s")
    return ["-" if own[key] is None else f"{own[key]:.2f} s" for key in keys]


# ---------------------------------------------------------------- stores


class Files:
    """A SQLite file in each run's folder."""

    name = "sqlite"

    def new(self) -> str | None:
        return None

    async def disturb(self, round: Round, draw: random.Random) -> None:
        """A file has no server that could go away."""


class Schemas:
    """A schema of a PostgreSQL database for each run, dropped at the end. A context manager."""

    name = "postgresql"

    def __init__(self, url: str) -> None:
        self._url = url
        self._made: list[str] = []

    def __enter__(self) -> Schemas:
        return self

    def __exit__(self, *_: object) -> None:
        for schema in self._made:
            self._execute(f"DROP SCHEMA {schema} CASCADE")

    def new(self) -> str | None:
        schema = f"chaos_{secrets.token_hex(6)}"
        self._execute(f"CREATE SCHEMA {schema}")
        self._made.append(schema)
        return (
            make_url(self._url)
            .update_query_dict({"options": f"-csearch_path={schema}"})
            .render_as_string(hide_password=False)
        )

    async def disturb(self, round: Round, draw: random.Random) -> None:
        """The server is another's."""

    def _execute(self, statement: str) -> None:
        import psycopg

        plain = make_url(self._url).set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(plain, autocommit=True, connect_timeout=10) as connection:
            connection.execute(statement)


class Server:
    """A PostgreSQL server of this program's own; a database for each run. ``server`` is that of tests/postgres.py."""

    name = "postgresql"

    def __init__(self, server: Any) -> None:
        self._server = server

    def new(self) -> str | None:
        return str(self._server.new_database())

    async def disturb(self, round: Round, draw: random.Random) -> None:
        """Every so often it is stopped or killed, and started again."""
        while True:
            await asyncio.sleep(draw.uniform(0.0, 2 * OUTAGE_GAP_S))
            round.outages.append(time.monotonic())
            end = draw.choice((self._server.stop, self._server.kill))
            outage = asyncio.create_task(asyncio.to_thread(self._outage, end, draw.uniform(0.0, 0.5)))
            try:
                await asyncio.shield(outage)
            finally:
                await outage  # whoever comes next finds it running

    def _outage(self, end: Callable[[], None], seconds: float) -> None:
        end()
        time.sleep(seconds)
        self._server.start()


Stores = Files | Schemas | Server


# ---------------------------------------------------------------- all rounds


def run(
    home: Path, forks: Nursery, kills: int, stores: Stores, seed: int = 0, on_kill: Callable[[], None] = lambda: None
) -> Iterator[Round]:
    """So many rounds that there are ``kills`` kills, in folders below ``home``; each as it is over."""
    draw, number, left_over = random.Random(seed), 0, kills
    while left_over > 0:
        left = min(left_over, KILLS)
        round = begin(home / f"round{number}", forks, stores.new(), seed=number, max_staleness=number % 2)

        async def disturb(round: Round = round, left: int = left) -> None:
            with_server = asyncio.create_task(stores.disturb(round, draw))
            try:
                await kill_at_random(round, forks, draw, left, on_kill)
            finally:
                with_server.cancel()
                await asyncio.gather(with_server, return_exceptions=True)

        asyncio.run(disturbed(round, disturb))
        left_over -= len(round.kills)
        number += 1
        yield round


def stores_of(option: str | None, stack: ExitStack) -> Stores:
    if option is None:
        return Files()
    if option != "postgres":
        return stack.enter_context(Schemas(option))
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    from postgres import PostgresServer, binaries

    programs = binaries()
    if programs is None:
        sys.exit("--store postgres: needs PostgreSQL's server programs (initdb, postgres)")
    return Server(stack.enter_context(PostgresServer(programs)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--store", help="a database's URL, or postgres; default: SQLite")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--keep", type=Path, help="an empty folder for the runs; default: a temporary one")
    arguments = parser.parse_args()
    if arguments.kills < 1:
        parser.error("--kills must be at least 1")
    console = Console()
    with ExitStack() as stack:
        home = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mgrpo-chaos-")))
        home.mkdir(parents=True, exist_ok=True)
        stores = stores_of(arguments.store, stack)
        with Progress(console=console) as progress:
            task = progress.add_task("kills", total=arguments.kills)
            forks = stack.enter_context(nursery(home / "compiled"))
            rounds = []
            for round in run(home, forks, arguments.kills, stores, arguments.seed, lambda: progress.advance(task)):
                rounds.append(round)
                console.print(line_of(len(rounds), round))
        result = result_of(rounds, stores.name)
    show(result, console)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(result["faults"]))


if __name__ == "__main__":
    main()
