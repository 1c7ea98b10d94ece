"""A private PostgreSQL for tests, where its programs are installed: durable, with passwords, on a loopback port.

Tests that need one skip where there is none, and fail instead where MGRPO_POSTGRES=required.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL

USER = "mgrpo"
PASSWORD = secrets.token_hex(8) + "@:/%é"  # new every time, and with what URLs and libpq's strings must escape
_SETTINGS = {
    "max_connections": "60",
    "shared_buffers": "16MB",
    "dynamic_shared_memory_type": "mmap",  # inside the folder, so that nothing is left behind by one that was killed
    "fsync": "on",
    "max_wal_size": "64MB",
}
_MEMORY, _MEMORY_NEEDED = Path("/dev/shm"), 1 << 30  # bytes
_START_SECONDS = 60.0


def binaries() -> Path | None:
    """The newest installed server's programs: on the path, or where Debian keeps them beside each other by version."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    versions = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    return max((path.parent for path in versions), key=lambda path: float(path.parent.name), default=None)


def binaries_or_skip() -> Path:
    folder = binaries()
    if folder is None:
        reason = "needs PostgreSQL's server programs (initdb, postgres), on the path or installed by the system"
        (pytest.fail if os.environ.get("MGRPO_POSTGRES") == "required" else pytest.skip)(reason)
    return folder


def _place() -> Path | None:
    """Memory where there is plenty: tests end processes, never the machine, so that nothing depends on the disk."""
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _MEMORY_NEEDED:
        return _MEMORY
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PostgresServer:
    """Started by `start`; a context manager that stops it and removes its folder.

    In a network ``namespace`` it listens at ``host`` there, and `reached_by` is how this process reaches it.
    """

    def __init__(self, programs: Path, host: str = "127.0.0.1", namespace: str = "") -> None:
        self._programs, self._host, self._namespace = programs, host, namespace
        self.folder = Path(tempfile.mkdtemp(prefix="mgrpo-postgres-", dir=_place()))
        self._data = self.folder / "data"
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self._account = _unprivileged_account()
        self.own(self.folder)

    def __enter__(self) -> PostgresServer:
        try:
            self._create()
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGQUIT)
        self._wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def own(self, folder: Path) -> None:
        """Give ``folder`` to the account that the server runs as."""
        if self._account:
            shutil.chown(folder, self._account["user"], self._account["group"])

    # ------------------------------------------------------------ databases

    def url(self, database: str, **parts: Any) -> str:
        """With user and password; ``parts`` replace parts of it, such as ``password=None``."""
        address: dict[str, Any] = {"username": USER, "password": PASSWORD, "host": self._host, "port": self.port}
        return URL.create("postgresql", **(address | parts), database=database).render_as_string(hide_password=False)

    def reached_by(self, database: str) -> str:
        """As `url`; a socket in its folder where this process is in another namespace."""
        if not self._namespace:
            return self.url(database)
        return self.url(database, host=None, port=None, query={"host": str(self.folder), "port": str(self.port)})

    def new_database(self) -> str:
        """The URL of a fresh, empty database."""
        self._databases += 1
        name = f"run_{self._databases}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Runs one statement outside of any transaction and returns its rows, if it has any."""
        import psycopg

        with psycopg.connect(self.reached_by(database), autocommit=True, connect_timeout=10) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    # ------------------------------------------------------------ life and death

    def start(self) -> None:
        """Starts the server and waits until it lets someone in."""
        deadline = time.monotonic() + _START_SECONDS
        while not self._accepts():
            if time.monotonic() > deadline:
                pytest.fail(f"PostgreSQL did not start:\n{self._log()}")
            if (
                self._process is None or self._process.poll() is not None
            ):  # not yet, or memory of a killed one was there
                self._process = self._launch()
            time.sleep(0.02)

    def stop(self) -> None:
        """Breaks all connections, rolls open transactions back and ends the server."""
        self.signal(signal.SIGINT)
        self._wait()

    def kill(self) -> None:
        """Ends it without a chance to put anything in order."""
        self.signal(signal.SIGKILL)
        self._wait()

    def restart(self) -> None:
        self.stop()
        self.start()

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def signal_all(self, number: signal.Signals) -> None:
        """To the server and every process that it started."""
        if self._process is not None:
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
            for pid in (self._process.pid, *map(int, children)):
                os.kill(pid, number)

    def _wait(self) -> None:
        if self._process is not None:
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _create(self) -> None:
        words = self.folder / "password"
        words.write_text(PASSWORD, encoding="utf-8")
        words.chmod(0o644)  # the folder itself is closed to others
        options = ("--username", USER, "--auth", "scram-sha-256", "--pwfile", words, "--no-sync")
        command = [self._programs / "initdb", "--pgdata", self._data, "--encoding", "UTF8", "--no-locale", *options]
        made = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False, **self._account)
        assert made.returncode == 0, made.stdout + made.stderr
        if self._namespace:
            with (self._data / "pg_hba.conf").open("a") as rules:
                rules.write("host all all samenet scram-sha-256\n")

    def _launch(self) -> subprocess.Popen[bytes]:
        own = {"listen_addresses": self._host, "unix_socket_directories": self.folder if self._namespace else ""}
        settings = [f"--{key}={value}" for key, value in (_SETTINGS | own).items()]
        command = [self._programs / "postgres", "-D", self._data, "-p", str(self.port), *settings]
        account = self._account
        if self._namespace:  # which only root may enter: what it enters with gives the account up
            ids = (f"--setuid={account['user']}", f"--setgid={account['group']}")
            command, account = ["nsenter", f"--net=/run/netns/{self._namespace}", *ids, "--", *command], {}
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, **account)

    def _accepts(self) -> bool:
        import psycopg

        if self._process is None or self._process.poll() is not None:
            return False
        try:
            psycopg.connect(self.reached_by("postgres"), connect_timeout=10).close()
        except psycopg.OperationalError:
            return False
        return True

    def _log(self) -> str:
        log = self.folder / "log"
        return log.read_text(encoding="utf-8", errors="replace")[-4000:] if log.exists() else "(no log)"


def _unprivileged_account() -> dict[str, Any]:
    """Arguments for `subprocess`: the server refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = names.get("postgres") or names["nobody"]
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": ()}
