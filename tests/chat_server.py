"""A chat service on this machine that gives scripted answers: what real ones send on good days and on bad ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    """``hang`` never answers; ``cut`` promises more bytes than it sends."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    hang: bool = False
    cut: bool = False


def completion(text: str | None, finish_reason: str = "stop", tokens: tuple[int, int] | None = (100, 20)) -> Answer:
    """The documented shape of a chat completion, with fields that nobody here reads."""
    body: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "served-name",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": finish_reason,
            }
        ],
    }
    if tokens is not None:
        body["usage"] = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
    return Answer(body=json.dumps(body).encode())


def refusal(status: int, message: str, code: str | None = None, **headers: str) -> Answer:
    """The documented shape of an error."""
    error = {"message": message, "type": "error", "param": None, "code": code}
    spelled = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, json.dumps({"error": error}).encode(), spelled)


class ChatServer(ThreadingHTTPServer):
    """Gives ``answers`` in turn, the last one again and again; remembers the bodies and keys of the requests."""

    daemon_threads = True

    def __init__(self, *answers: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.over = threading.Event()
        self.lock = threading.Lock()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def next(self) -> Answer:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ChatServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(body)
            self.server.keys.append(self.headers["Authorization"])
            answer = self.server.next() if self.path == "/v1/chat/completions" else refusal(404, f"no {self.path}")
        if answer.hang:
            self.server.over.wait()
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in {"Content-Type": "application/json", **answer.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body) + (1000 if answer.cut else 0)))
        self.end_headers()
        try:
            self.wfile.write(answer.body)
        except ConnectionError:  # who asked has hung up, as on what is far too long
            answer = Answer(cut=True)
        self.close_connection = answer.cut

    def log_message(self, format: str, *args: Any) -> None:
        """Tests read what they need from the server's lists."""


@contextmanager
def serving(*answers: Answer) -> Iterator[ChatServer]:
    server = ChatServer(*answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
