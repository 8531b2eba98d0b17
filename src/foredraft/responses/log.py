"""Outcomes as they come in, so that a run that was stopped goes on where it was.

One file for each process, one line for each group of conversations that was answered together; a line that was cut off
by a kill is no line.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from foredraft.responses.dialogue import Outcome


class AnswerLog:
    """Appends outcomes durably, and finds them again."""

    def __init__(self, folder: Path, writer: int = 0):
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self._path = folder / f"answers-{writer:03d}.jsonl"

    def append(self, outcomes: Iterable[Outcome]) -> None:
        """Add the outcomes of one group, all of them or none."""
        line = json.dumps([outcome.to_json() for outcome in outcomes], separators=(",", ":"))
        with self._path.open("a+b") as stream:
            # After a line that was cut off, begin a new one.
            if stream.tell():
                stream.seek(-1, os.SEEK_END)
                line = line if stream.read(1) == b"\n" else f"\n{line}"
            stream.write(line.encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())

    def ids(self) -> set[str]:
        """Conversations that have their outcome."""
        return {outcome.id for outcome in self.read()}

    def read(self) -> Iterator[Outcome]:
        """Every outcome of every process."""
        for path in sorted(self._folder.glob("answers-*.jsonl")):
            with path.open("rb") as stream:
                for line in stream:
                    try:
                        records = json.loads(line)
                    except ValueError:
                        continue  # cut off by a kill: its group is asked again
                    yield from map(Outcome.from_json, records)
