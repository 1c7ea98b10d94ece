"""A planner and its sub-agent on two machines that share a database and a place for weights: two network namespaces."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from parts_running import Parts, assert_ledger
from postgres import PASSWORD, PostgresServer, binaries_or_skip
from tiny_recipe import REINFORCE, WARM_UP, table, warmed_team

from mgrpo.config import resolve


class Machine(NamedTuple):
    namespace: str
    address: str


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two namespaces with a cable between them and nothing else; skips where there can be none."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("nsenter"):
        pytest.skip("needs root, ip (iproute2) and nsenter (util-linux) to make network namespaces")
    name = f"mg{secrets.token_hex(4)}"
    machines = Machine(f"{name}a", "192.0.2.1"), Machine(f"{name}b", "192.0.2.2")
    with ExitStack() as stack:
        try:
            for machine in machines:
                ip("netns", "add", machine.namespace)
                stack.callback(subprocess.run, ["ip", "netns", "delete", machine.namespace], check=True)
            ends = [("name", machine.namespace, "netns", machine.namespace) for machine in machines]
            ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for machine in machines:
                ip("-n", machine.namespace, "address", "add", f"{machine.address}/30", "dev", machine.namespace)
                for link in (machine.namespace, "lo"):  # a machine reaches its own address by the latter
                    ip("-n", machine.namespace, "link", "set", link, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs the right to make network namespaces ({error.stderr.strip()})")
        yield machines


def crossed(machine: Machine) -> int:
    """Bytes that came over the cable to ``machine``."""
    path = f"/sys/class/net/{machine.namespace}/statistics/rx_bytes"
    command = ["ip", "netns", "exec", machine.namespace, "cat", path]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_a_team_on_two_machines_trains_and_each_learner_reads_its_own_trajectories_alone(tmp_path: Path) -> None:
    stages = [WARM_UP | {"steps": 2}, REINFORCE | {"steps": 3}]
    short = {"questions": 1, "tasks": {"split": "test"}, "examples": 0, "closed_book": False}
    made = table(stages=stages, evaluation=short, reward="tiny_recipe:token_reward", store_timeout_s=120.0)
    for agent, model in warmed_team().items():
        made["agents"][agent] |= {"model": model}
    config = resolve(made)
    shared = ("--weights", str(tmp_path / "shared"))
    with two_machines() as (one, other), PostgresServer(binaries_or_skip(), one.address, one.namespace) as server:
        server.new_database()
        url, here = server.url("run_1", password=None), server.reached_by("run_1")
        environment = {"PGPASSWORD": PASSWORD, "MGRPO_TOKEN": secrets.token_hex(16)}

        def parts_of(machine: Machine) -> Parts:
            home, options = tmp_path / machine.namespace, ("--store", url)
            return Parts(home, config, *options, store=here, namespace=machine.namespace, environment=environment)

        with parts_of(one) as planners, parts_of(other) as searchers:
            planners.start("tools", options=("--host", one.address))
            planners.start("serve", "planner", options=("--host", one.address, *shared))
            planners.start("learn", "planner", options=shared)
            searchers.start("serve", "searcher", options=("--host", other.address, *shared))
            searchers.start("learn", "searcher", options=shared)
            searchers.start("collect", options=shared)
            planners.complete()
            searchers.complete()
            assert {part.url.split(":")[1] for part in planners.store.parts()} == {"//192.0.2.1", "//192.0.2.2"}
            assert_ledger(planners.store, config)
            read = {
                agent: sum(record["store_bytes"] for record in parts.records("learn") if record["agent"] == agent)
                for agent, parts in (("planner", planners), ("searcher", searchers))
            }
            sizes = dict(
                server.execute("SELECT agent, sum(octet_length(record)) FROM trajectories GROUP BY agent", "run_1")
            )
            assert read == sizes and min(read.values()) > 0
            assert crossed(one) > sum(sizes.values()) and crossed(other) > read["searcher"]
            assert (tmp_path / "shared").is_dir() and not list(tmp_path.glob("*/run/weights"))
        for machine in (one, other):
            files = [path for path in (tmp_path / machine.namespace).rglob("*") if path.is_file()]
            assert not any(PASSWORD.encode() in path.read_bytes() for path in files)
