"""Work over processes: in order, bounded, and clear when a worker dies."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from foredraft.accounts import Account
from foredraft.workers import AHEAD, map_in_order, worker_count
from tests.conftest import ROOT


def squarer(offset: int) -> Callable[[int], int]:
    return lambda n: n * n + offset


def process_ids() -> Callable[[int], int]:
    return lambda n: os.getpid()


def fragile() -> Callable[[int], int]:
    def work(n: int) -> int:
        if n == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return n

    return work


def note_and_sleep() -> Callable[[str], None]:
    def work(folder: str) -> None:
        (Path(folder) / str(os.getpid())).touch()
        time.sleep(120)

    return work


def faulty() -> Callable[[int], int]:
    def work(n: int) -> int:
        raise ValueError(f"row {n} is odd")

    return work


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_tasks(workers: int) -> None:
    assert list(map_in_order(partial(squarer, 5), range(20), workers)) == [n * n + 5 for n in range(20)]
    assert list(map_in_order(partial(squarer, 5), [], workers)) == []


def test_a_single_task_is_done_here_and_more_are_not() -> None:
    assert set(map_in_order(process_ids, [1], 2)) == {os.getpid()}
    assert os.getpid() not in set(map_in_order(process_ids, range(8), 2))


def test_tasks_are_taken_only_as_they_are_needed() -> None:
    """A million rows are not all in flight at once."""
    taken: list[int] = []

    def tasks() -> Iterator[int]:
        for n in range(100):
            taken.append(n)
            yield n

    results = map_in_order(partial(squarer, 0), tasks(), 2)
    next(results)
    assert len(taken) <= 2 * AHEAD + 2
    results.close()  # type: ignore[attr-defined]


def test_a_worker_that_is_killed_is_one_clear_line() -> None:
    with pytest.raises(ValueError, match=r"a worker process died .*FOREDRAFT_WORKERS=1") as caught:
        list(map_in_order(fragile, range(8), 2))
    assert "\n" not in str(caught.value)


def test_workers_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    code = "import tests.unit.test_workers as t; list(t.map_in_order(t.note_and_sleep, [str(t.sys.argv[1])] * 8, 2))"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env={**os.environ, "PYTHONPATH": "src"}
    )
    deadline = time.monotonic() + 60
    while len(noted := list(tmp_path.iterdir())) < 2:
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    while any(Path(f"/proc/{path.name}").exists() for path in noted):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)


def test_an_exception_of_the_work_comes_through() -> None:
    with pytest.raises(ValueError, match="row 0 is odd"):
        list(map_in_order(faulty, range(8), 2))


def broken() -> Callable[[int], int]:
    raise ValueError("no tokenizer here")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_cannot_start_says_why(workers: int) -> None:
    with pytest.raises(ValueError, match="no tokenizer here"):
        list(map_in_order(broken, range(8), workers))


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_number_of_workers_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FOREDRAFT_WORKERS", text)
    with pytest.raises(ValueError, match=f"FOREDRAFT_WORKERS = '{text}'"):
        worker_count()
    monkeypatch.setenv("FOREDRAFT_WORKERS", "3")
    assert worker_count() == 3
    monkeypatch.delenv("FOREDRAFT_WORKERS")
    assert worker_count() >= 1


def test_an_account_that_is_off_is_our_own_bug() -> None:
    account = Account("s")
    account.keep()
    account.skip("odd", "row 1")
    account.skip("odd", "row 2")
    with pytest.raises(AssertionError, match="1 rows counted, 2 written"):
        account.check(2)
    assert account.counts() == {"rows_in": 3, "rows_out": 1, "skipped": {"odd": 2}}
    assert str(account) == "2 odd (first: row 1)"
