"""Answers by a real server over HTTP: ``transformers serve`` with the real small target, killed and started again."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from foredraft.responses.config import RespondConfig, ServerConfig
from foredraft.responses.respond import respond
from foredraft.sources.config import FetchConfig
from foredraft.target.config import TargetConfig
from foredraft.target.frozen import FrozenTarget
from foredraft.target.generate import greedy_answers
from foredraft.target.interface import write_interface
from tests.unit.test_responses import SETTINGS, answers_of, conversation, make_conversations

pytestmark = pytest.mark.slow
QUESTIONS = [
    "What is the capital of France?",
    "Name a colour.",
    "What is two plus two?",
    "Say hello.",
    "Who wrote Hamlet?",
]
ROWS = [conversation(n, question, "Why?") for n, question in enumerate(QUESTIONS)]
FETCH = FetchConfig(stall_seconds=5, retries=0)


class Server:
    """``transformers serve`` on a port of its own."""

    def __init__(self, model: Path, log: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._model, self._log = model, log
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        command = [str(Path(sys.executable).parent / "transformers"), "serve", str(self._model), "--dtype", "float32"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu"]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def kill(self) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self._log.read_text()[-2000:]
            try:
                if requests.get(f"{self.url}/models", timeout=5).ok:
                    return
            except requests.RequestException:
                time.sleep(0.3)
        raise AssertionError(f"the server did not come up: {self._log.read_text()[-2000:]}")


@pytest.fixture
def server(smollm_folder: Path, tmp_path: Path) -> Iterator[Server]:
    running = Server(smollm_folder, tmp_path / "server.log")
    running.start()
    yield running
    if running.process is not None and running.process.poll() is None:
        running.kill()


def settings(server: Server, **changes: Any) -> RespondConfig:
    values = {"url": server.url, "token_ids": False, "concurrency": 2, "retries": 6, "timeout_seconds": 60}
    values |= {"model": str(server._model), **changes}
    return RespondConfig(**SETTINGS | {"backend": "server", "max_new_tokens": 16, "server": ServerConfig(**values)})


def test_answers_of_a_server_that_was_killed_half_way_equal_the_targets_own(
    server: Server, smollm_folder: Path, smollm: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREDRAFT_SCRATCH", str(tmp_path / "scratch"))
    target = TargetConfig(uri=f"file:{smollm_folder}", dtype="float32", thinking=False, kept_layers=0)
    interface = tmp_path / "interface"
    write_interface(target, FETCH, interface)
    asked = make_conversations(tmp_path / "conversations", ROWS)
    server.wait()

    # Without tries to spare, a server that dies ends the run; what was answered is kept.
    def kill_after_the_first_answers() -> None:
        while not list((tmp_path / "scratch").rglob("answers-*.jsonl")):
            time.sleep(0.05)
        server.kill()

    killer = threading.Thread(target=kill_after_the_first_answers)
    killer.start()
    with pytest.raises(ValueError, match=r"no answer after 1 tries .* Answers so far are kept"):
        respond("s", settings(server, retries=0), target, FETCH, asked, interface, tmp_path / "out")
    killer.join()
    assert not (tmp_path / "out").exists()
    answered = {path: path.read_bytes() for path in (tmp_path / "scratch").rglob("answers-*.jsonl")}
    assert answered

    # With tries to spare the run waits for the server to come back, and asks for nothing that it has.
    server.start()
    counts = respond("s", settings(server), target, FETCH, asked, interface, tmp_path / "out")
    for path, before in answered.items():
        assert path.read_bytes().startswith(before)
    assert counts["rows_in"] == 2 * len(ROWS) == counts["rows_out"] + counts["skipped"].get("tokens_not_proven", 0)
    rows = answers_of(tmp_path / "out")
    assert len({(row.id, row.turn) for row in rows}) == len(rows) >= len(ROWS)
    for row in rows:
        assert row.response_ids == greedy_answers(smollm.model, [row.prompt_ids], 16, [2])[0]
        assert row.finish_reason == ("stop" if row.response_ids[-1] == 2 else "length")
