"""A real web server on this machine that can misbehave, and a stand-in for the Hugging Face hub behind it."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" + "0" * 34


@dataclass
class File:
    """What is served at a path; ``faults`` befall its next bodies: ``(drop or stall, after how many bytes)``."""

    content: bytes = b""
    etag: str | None = '"first"'
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    faults: list[tuple[str, int]] = field(default_factory=list)


@dataclass
class Server:
    """Holds files by path, and remembers what it was asked; ``released`` ends every stall."""

    url: str
    files: dict[str, File] = field(default_factory=dict)
    asked: list[tuple[str, Message]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def ranges_of(self, path: str) -> list[str | None]:
        """The ``Range`` of every request for ``path``."""
        return [headers["Range"] for name, headers in self.asked if name == path]

    def hold_repository(self, kind: str, name: str, files: dict[str, bytes]) -> None:
        """Answer as the hub does for a repository that holds ``files``."""
        prefix = "datasets/" if kind == "datasets" else ""
        self.hold_json(f"/api/{kind}/{name}/revision/{COMMIT}", {"id": name, "sha": COMMIT, "siblings": []})
        self.hold_json(f"/api/{kind}/{name}/tree/{COMMIT}", [_entry(path, body) for path, body in files.items()])
        for path, body in files.items():
            headers = {"X-Repo-Commit": COMMIT}
            etag = '"' + hashlib.sha256(body).hexdigest() + '"'
            self.files[f"/{prefix}{name}/resolve/{COMMIT}/{path}"] = File(body, etag, headers=headers)

    def hold_json(self, path: str, content: Any) -> None:
        self.files[path] = File(json.dumps(content).encode(), headers={"Content-Type": "application/json"})


def _entry(path: str, body: bytes) -> dict[str, Any]:
    pointer = hashlib.sha1(f"blob {len(body)}\0".encode() + body).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(body), "oid": pointer}
    if path.endswith(".parquet"):
        entry["lfs"] = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 134}
    return entry


class _Handler(BaseHTTPRequestHandler):
    state: Server

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.state.asked.append((path, self.headers))
        file = self.state.files.get(path, File(status=404))
        begin, asked = 0, self.headers["Range"]
        current = self.headers["If-Range"] in (None, file.etag)
        if asked and file.ranges and current and file.status == 200:
            begin = int(asked.removeprefix("bytes=").removesuffix("-"))
        body = file.content[begin:]
        self.send_response(206 if begin else file.status)
        self.send_header("Content-Length", str(len(body)))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(file.content) - 1}/{len(file.content)}")
        for name, value in (({"ETag": file.etag} if file.etag else {}) | file.headers).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self._send(body, *(file.faults.pop(0) if file.faults else ("", len(body))))

    def _send(self, body: bytes, fault: str, after: int) -> None:
        with suppress(OSError):  # the client went away
            self.wfile.write(body[:after])
            self.wfile.flush()
            if fault == "stall":
                self.state.released.wait(20)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


@contextmanager
def serving() -> Iterator[Server]:
    """Run a server until the end of the block."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.state = Server(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield handler.state
    finally:
        handler.state.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
