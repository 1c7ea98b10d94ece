"""Processes that start in milliseconds: forks of a server in which everything is imported and nothing has run.

::

    mgrpo.launch.supervise --starts--> client ==socket==> nursery --forks--> the part: a real process, really killed
                                       ends as its part ends, and its part does not outlive it

This file is both: ``chaos_forks.py nursery SOCKET MODULE FUNCTION`` and ``chaos_forks.py client SOCKET NAME ARGV...``.
The client imports next to nothing. ``FUNCTION`` of ``MODULE`` is called in the fork with (name, argv); what it returns
is the exit code. Whoever holds the nursery's standard input may end it, and every fork with it, by closing it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # the client imports as little as it can
    from typing import Any

WANTED = ("MGRPO_", "PG")  # variables of a part's environment that its client hands over
START_S = 180.0  # for a nursery to import everything
_MOST = 1 << 16  # bytes of a message


# ---------------------------------------------------------------- the client


def client(place: str, name: str, argv: list[str]) -> None:
    """Have the nursery fork a part whose output goes where this process's goes; end as it ends."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(place)
    environment = {key: value for key, value in os.environ.items() if key.startswith(WANTED)}
    order = json.dumps({"start": name, "argv": argv, "environment": environment}).encode()
    socket.send_fds(connection, [order + b"\n"], [1])
    signal.signal(signal.SIGTERM, lambda *_: connection.send(b"stop\n"))
    told = connection.makefile().readline()
    code = int(told) if told else 1  # the nursery is gone, and its forks with it
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# ---------------------------------------------------------------- who asks the nursery for something else


class Nursery:
    """A nursery of this process; a context manager."""

    def __init__(self, place: str, module: str, function: str, environment: dict[str, str]) -> None:
        import subprocess

        self.place = place
        command = [sys.executable, __file__, "nursery", place, module, function]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
        self._connection: socket.socket | None = None

    def __enter__(self) -> Nursery:
        import select

        assert self._process.stdout is not None
        there, _, _ = select.select([self._process.stdout], [], [], START_S)
        if not there or self._process.stdout.readline() != b"ready\n":
            self.__exit__()
            raise RuntimeError("the nursery did not start; see its error above")
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(30.0)
        self._connection.connect(self.place)
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()
        try:
            self._process.communicate(timeout=30)
        finally:
            self._process.kill()  # its forks go with it

    @property
    def process_id(self) -> int:
        return self._process.pid

    def command(self, name: str, *argv: str) -> tuple[str, ...]:
        """What starts a part as a program."""
        return (sys.executable, "-I", "-S", __file__, "client", self.place, name, *argv)

    def signal(self, name: str, number: int) -> int | None:
        """Send a signal to the part of this name; its process id, None where it is not there."""
        return self._ask({"signal": name, "number": number})

    def pid(self, name: str) -> int | None:
        return self.signal(name, 0)

    def _ask(self, what: dict[str, object]) -> int | None:
        assert self._connection is not None
        self._connection.sendall(json.dumps(what).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            answer += self._connection.recv(_MOST)
        found = json.loads(answer)
        return None if found is None else int(found)


# ---------------------------------------------------------------- the nursery


def nursery(place: str, module: str, function: str) -> None:
    import gc
    import importlib
    import selectors

    serve = getattr(importlib.import_module(module), function)
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen(64)
    waker, woken = os.pipe()[::-1]
    os.set_blocking(waker, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    for file in (listener, woken, sys.stdin):
        selector.register(file, selectors.EVENT_READ)
    own = _Forks(serve, selector, [waker, woken])
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                selector.register(connection, selectors.EVENT_READ)
            elif key.fileobj is woken:
                os.read(woken, _MOST)
                own.reap()
            elif key.fileobj is sys.stdin:
                own.end()
                return
            else:
                own.read(key.fileobj)  # type: ignore[arg-type]


class _Forks:
    """What the nursery has forked, by the connection of each one's client."""

    def __init__(self, serve: Any, selector: Any, private: list[int]) -> None:
        self._serve, self._selector, self._private = serve, selector, private
        self._pids: dict[socket.socket, int] = {}
        self._names: dict[str, int] = {}

    def read(self, connection: socket.socket) -> None:
        try:
            data, files, _, _ = socket.recv_fds(connection, _MOST, 1)
        except ConnectionError:
            data, files = b"", []
        if not data:
            self._forget(connection)
        for line in data.splitlines():
            if line == b"stop":
                if connection in self._pids:
                    os.kill(self._pids[connection], signal.SIGTERM)
            elif "start" in (order := json.loads(line)):
                self._start(connection, order, files[0])
            else:
                self._signal(connection, order)

    def _start(self, connection: socket.socket, order: dict[str, Any], output: int) -> None:
        name = order["start"]
        pid = os.fork()
        if pid == 0:
            self._become(name, order, output)
        os.close(output)
        self._pids[connection] = self._names[name] = pid

    def _become(self, name: str, order: dict[str, Any], output: int) -> None:
        """In the fork: the part. Never returns."""
        code = 1
        try:
            _die_with_parent()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for old, new in ((nothing, 0), (output, 1), (output, 2)):
                os.dup2(old, new)
            for number in (nothing, output, *self._private, self._selector.fileno()):
                os.close(number)
            for other in [key.fileobj for key in self._selector.get_map().values()]:
                if isinstance(other, socket.socket):
                    other.close()
            os.environ.update(order["environment"])
            code = self._serve(name, order["argv"])
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _signal(self, connection: socket.socket, order: dict[str, Any]) -> None:
        pid = self._names.get(order["signal"])
        if pid is not None:
            os.kill(pid, order["number"])
        connection.sendall(json.dumps(pid).encode() + b"\n")

    def reap(self) -> None:
        while self._pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = next((own for own, its in self._pids.items() if its == pid), None)
            self._names = {name: own for name, own in self._names.items() if own != pid}
            if connection is not None:
                del self._pids[connection]
                try:
                    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
                except OSError:
                    continue  # its client was killed first

    def _forget(self, connection: socket.socket) -> None:
        """A client that is gone takes its part along."""
        self._selector.unregister(connection)
        connection.close()
        pid = self._pids.get(connection)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
        while self._pids:
            pid, _ = os.waitpid(-1, 0)
            self._pids = {own: its for own, its in self._pids.items() if its != pid}


def _die_with_parent() -> None:
    """A nursery that is killed leaves nobody behind either."""
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "client":
        client(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
        nursery(*sys.argv[2:5])
