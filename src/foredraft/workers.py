"""Work spread over processes, with results in the order of the tasks and bounded memory.

How many processes is a matter of the machine, never of params: outputs do not depend on it.
"""

import itertools
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

AHEAD = 2
"""Tasks in flight for each worker: enough to keep it busy, few enough to bound memory."""

_work: Callable[[Any], Any] | Exception | None = None
"""What this process does with a task, or why it cannot; set once, when a worker starts."""


def worker_count() -> int:
    """``$FOREDRAFT_WORKERS``, by default the cores that this process may use.

    Raises:
        ValueError: the variable is not a whole number above zero.
    """
    text = os.environ.get("FOREDRAFT_WORKERS", "")
    if not text:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not (text.isascii() and text.isdecimal()) or int(text) == 0:
        raise ValueError(f"FOREDRAFT_WORKERS = {text!r}: expected a whole number above zero")
    return int(text)


def map_in_order(
    make: Callable[[], Callable[[Task], Result]], tasks: Iterable[Task], workers: int | None = None
) -> Iterator[Result]:
    """Yield the results of ``make()(task)`` in the order of ``tasks``.

    ``make`` is called once in each worker: what it builds (a tokenizer, a set of n-grams) is not sent with every task. A
    single task, or a single worker, is done in this process.

    Raises:
        ValueError: a worker died (killed, or out of memory). An exception of the work itself comes through as it is.
    """
    workers = worker_count() if workers is None else workers
    tasks = iter(tasks)
    first = list(itertools.islice(tasks, 2))
    tasks = itertools.chain(first, tasks)
    if workers == 1 or len(first) < 2:
        work = make()
        yield from map(work, tasks)
        return
    yield from _in_processes(make, tasks, workers)


def _in_processes(
    make: Callable[[], Callable[[Task], Result]], tasks: Iterator[Task], workers: int
) -> Iterator[Result]:
    # Forked from a server that has imported the work's module and has no threads: cheap to start, and safe.
    context = multiprocessing.get_context("forkserver")
    module = getattr(make, "func", make).__module__
    context.set_forkserver_preload([module])
    waiting: deque[Future[Result]] = deque()
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(make,))
    try:
        for task in tasks:
            waiting.append(pool.submit(_do, task))
            if len(waiting) > workers * AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise ValueError(
            "a worker process died (killed, or out of memory); fewer of them need less: FOREDRAFT_WORKERS=1"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(make: Callable[[], Callable[[Any], Any]]) -> None:
    global _work
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        _work = make()
    except Exception as error:  # of a worker that does not start a pool would only say that it died
        _work = error


def _leave_with_parent() -> None:
    """End this process when the one that asked for it has ended: killed, it could tell nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _do(task: Any) -> Any:
    if isinstance(_work, Exception):
        raise _work
    assert _work is not None
    return _work(task)
