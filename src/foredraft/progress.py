"""What is done, what is left, and when something last moved: a bar for people, a heartbeat file for the rest."""

import json
import os
import time
from types import TracebackType

from tqdm import tqdm

from foredraft.artifacts import write_atomic
from foredraft.scratch import scratch_root

BEAT_SECONDS = 1.0


class Progress:
    """A bar on standard error, and ``<scratch>/heartbeat/<name>.json`` at most once a second.

    Use as a context manager; a stage that died leaves a heartbeat whose ``state`` is still ``running`` and whose
    ``moved`` no longer advances. Bytes (``unit`` is ``B``) are shown scaled; ``total`` is None while it is not known.
    """

    def __init__(self, name: str, total: int | None, unit: str, done: int = 0):
        self.name, self.total, self.unit = name, total, unit
        self._path = scratch_root() / "heartbeat" / f"{name}.json"
        self._done = done
        self._beaten = 0.0
        bytes_come = unit == "B"
        self._bar = tqdm(
            total=total,
            initial=done,
            unit=unit if bytes_come else f" {unit}",
            unit_scale=bytes_come,
            desc=name,
            mininterval=1.0,
            dynamic_ncols=True,
        )

    def advance(self, amount: int, note: str = "") -> None:
        """Count ``amount`` more units; ``note`` is shown behind the bar."""
        self._done += amount
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(amount)
        if time.monotonic() - self._beaten >= BEAT_SECONDS:
            self._beat("running")

    def reach(self, done: int, total: int | None = None) -> None:
        """Count ``done`` units in all, of ``total`` if that is known by now; back to fewer where work begins again."""
        if total is not None:
            self.total = self._bar.total = total
        self._bar.initial = min(self._bar.initial, done)  # or the rate would be of less than nothing
        self.advance(done - self._done)

    def _beat(self, state: str) -> None:
        self._beaten = time.monotonic()
        beat = {
            "stage": self.name,
            "state": state,
            "done": self._done,
            "total": self.total,
            "unit": self.unit,
            "moved": time.time(),
            "pid": os.getpid(),
        }
        write_atomic(self._path, json.dumps(beat) + "\n")

    def __enter__(self) -> "Progress":
        self._beat("running")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._beat("failed" if kind else "done")
