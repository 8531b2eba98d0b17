"""Where a run's curve is told while it goes on: DVCLive's files, and by one param TensorBoard or Weights & Biases."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Track = Callable[[Record], None]

OF_THE_MACHINE = ("seconds", "waited")
"""Of a record, what differs from run to run: no curve."""


def check_tracker(tracker: str | None) -> None:
    """Raises ValueError: the package that ``train.tracker`` wants is not installed."""
    if tracker is not None and find_spec(tracker) is None:
        raise ValueError(f"train.tracker = {tracker}: that package is not here: pip install {tracker}")


@contextmanager
def tracking(live: Path | None, tracker: str | None, work: Path, past: list[Record]) -> Iterator[Track]:
    """A function that takes one record of the curve after the other.

    Args:
        live: folder of DVCLive's curves, written anew; None, or DVCLive not installed: none.
        tracker: ``tensorboard``, ``wandb`` or None.
        work: the run's work folder; a run that goes on there goes on in its tracker too.
        past: records of the steps before, when it goes on.
    """
    with ExitStack() as stack:
        tracks: list[Track] = []
        if live is not None and find_spec("dvclive") is not None:
            tracks.append(stack.enter_context(_dvclive(live)))
        if tracker == "tensorboard":
            tracks.append(stack.enter_context(_tensorboard(work / "tensorboard", len(past))))
        elif tracker == "wandb":
            tracks.append(stack.enter_context(_wandb(work, len(past))))

        def track(record: Record) -> None:
            told = {key: value for key, value in record.items() if key not in OF_THE_MACHINE}
            for tell in tracks:
                tell(told)

        for record in list(past):
            track(record)
        yield track


@contextmanager
def _dvclive(folder: Path) -> Iterator[Track]:
    from dvclive import Live

    with Live(dir=str(folder), save_dvc_exp=False, dvcyaml=None) as live:

        def tell(record: Record) -> None:
            live.step = record["step"]
            for key, value in record.items():
                if key != "step":
                    live.log_metric(key, value)
            live.make_summary()
            live.post_data_to_studio()

        yield tell


@contextmanager
def _tensorboard(folder: Path, done: int) -> Iterator[Track]:
    from torch.utils.tensorboard import SummaryWriter

    # What was written behind the checkpoint is taken back.
    with SummaryWriter(str(folder), purge_step=done + 1) as writer:

        def tell(record: Record) -> None:
            if done < record["step"]:
                for key, value in record.items():
                    writer.add_scalar(f"train/{key}", value, record["step"])

        yield tell


@contextmanager
def _wandb(work: Path, done: int) -> Iterator[Track]:
    import wandb

    with wandb.init(project="foredraft", id=work.name, resume="allow", dir=str(work)) as run:

        def tell(record: Record) -> None:
            if done < record["step"]:
                run.log(record, step=record["step"])

        yield tell
