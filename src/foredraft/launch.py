"""One process for each GPU, on this machine or on several, through PyTorch's own elastic launcher.

Several machines: each sets ``FOREDRAFT_NODES`` (how many there are) and ``FOREDRAFT_RENDEZVOUS`` (``host:port`` of the
first), and shares the scratch folder with the others. ``FOREDRAFT_PROCESSES`` sets how many processes a machine starts.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foredraft.artifacts import ArtifactError, write_atomic

REFUSED = "refused-"
SHUTDOWN_SECONDS = 120
"""How long processes that are told to stop may take to keep what is done; older PyTorch gives them 30."""


def process_count() -> int:
    """``$FOREDRAFT_PROCESSES``, by default one for each local GPU, and one without any.

    Raises:
        ValueError: it is not a whole number above zero, or more than there are GPUs.
    """
    import torch

    gpus = torch.cuda.device_count()
    found = _count("FOREDRAFT_PROCESSES") or max(1, gpus)
    if gpus and found > gpus:
        raise ValueError(f"FOREDRAFT_PROCESSES = {found}: this machine has {gpus} GPUs, one for each process")
    return found


def node_count() -> int:
    """``$FOREDRAFT_NODES``, by default 1."""
    return _count("FOREDRAFT_NODES") or 1


def launch(
    entry: Callable[[Any], None],
    job: Any,
    name: str,
    scratch: Path,
    processes: int,
    nodes: int = 1,
    restarts: int = 0,
    again: str = "what is finished is kept: run it again",
) -> None:
    """Run ``entry(job)`` in ``processes`` processes of each machine and wait for all; see :func:`place` for who is who.

    When a process dies all of its group are started again, up to ``restarts`` times: work that is kept by piece loses
    no more than the pieces in flight. What is wrong with the data or the params is told once, not tried again.

    Args:
        name: what the work is called, for messages.
        scratch: the work's folder; machines that do the same work share it and meet under its name.
        nodes: machines that take part.
        again: what someone does whose work was cut off.

    Raises:
        ValueError: what a process refused; or one failed and no restart is left, machines did not meet, or the work was told
            to stop. Names it and its last words.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    endpoint = rendezvous() if nodes > 1 else "localhost:0"
    if nodes == 1:
        # Processes that are started again would meet the addresses of the dead ones in a store that they share.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if nodes > 1:
        print(f"{name}: waiting at {endpoint} until {nodes} machines do this same work")
    known = LaunchConfig.__dataclass_fields__
    patience: dict[str, Any] = {"shutdown_timeout": SHUTDOWN_SECONDS} if "shutdown_timeout" in known else {}
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=processes,
        run_id=f"{name}-{os.getpid()}" if nodes == 1 else f"{name}-{scratch.name}",
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        max_restarts=restarts,
        **patience,
    )
    for old in scratch.glob(f"{REFUSED}*"):
        old.unlink()
    try:
        elastic_launch(config, _run_or_refuse)(entry, job, scratch)
    except SignalException as error:
        raise ValueError(_refused(scratch) or f"told to stop; {again}") from error
    except ChildFailedError as error:
        if told := _refused(scratch):
            raise ValueError(told) from error
        rank, failure = error.get_first_failure()
        told = failure.message if isinstance(failure.message, str) else failure.message.get("message", "")
        last = str(told).strip().splitlines()[-1:] or [f"exit code {failure.exitcode}"]
        raise ValueError(f"process {rank} of {nodes * processes} failed ({last[0]}); {again}") from error
    except (RendezvousError, DistError) as error:
        raise ValueError(
            f"{nodes} machines did not meet at {endpoint} ({type(error).__name__}): is the first one there, and do "
            "all have the same params, code and data?"
        ) from error
    if told := _refused(scratch):
        raise ValueError(told)


def _run_or_refuse(entry: Callable[[Any], None], job: Any, scratch: Path) -> None:
    if _refused(scratch):
        return  # started again because another one refused: it would be the same
    try:
        entry(job)
    except (ValueError, ArtifactError) as error:
        write_atomic(scratch / f"{REFUSED}{place()[0]}", str(error))
        raise SystemExit(1) from error  # the others may wait for this one


def _refused(scratch: Path) -> str:
    return next((path.read_text(encoding="utf-8") for path in sorted(scratch.glob(f"{REFUSED}*"))), "")


def rendezvous() -> str:
    """``$FOREDRAFT_RENDEZVOUS``, where machines meet.

    Raises:
        ValueError: it is not set, or not ``host:port``.
    """
    endpoint = os.environ.get("FOREDRAFT_RENDEZVOUS", "")
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"FOREDRAFT_RENDEZVOUS = {endpoint!r}: several machines need host:port of the first one there")
    return endpoint


def place() -> tuple[int, int, str | None]:
    """Rank and number of a launched process, and its device; only for a process that :func:`launch` started.

    Another launcher's ``RANK`` may stand in the environment of any process: this must not be asked elsewhere.
    """
    import torch

    local = local_rank()
    device = f"cuda:{local}" if torch.cuda.is_available() else None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device


def local_rank() -> int:
    """Which process of its machine a launched process is."""
    return int(os.environ["LOCAL_RANK"])


def _count(variable: str) -> int:
    text = os.environ.get(variable, "")
    if text and (not (text.isascii() and text.isdecimal()) or int(text) == 0):
        raise ValueError(f"{variable} = {text!r}: expected a whole number above zero")
    return int(text or 0)
