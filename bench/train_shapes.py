"""What round batch sizes are worth to a training step on this machine.

usage: python bench/train_shapes.py [steps]     (after make repro; reads data/features and data/target)

Both variants train on the same documents in alternation, in one process; the figure is a ratio.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from rich.console import Console
from rich.table import Table

from foredraft.drafter.config import DrafterShape
from foredraft.params import load_section, read_params
from foredraft.target.interface import read_interface
from foredraft.training import batches, objective
from foredraft.training.checkpoint import Progressed
from foredraft.training.config import TrainConfig
from foredraft.training.trainer import Trainer

SIZES = {"as drawn": (1, 1, 1), "rounded": (batches.LENGTH_MULTIPLE, batches.ANCHOR_MULTIPLE, objective.SLOT_MULTIPLE)}


def main(steps: int) -> None:
    """Time ``steps`` steps of each variant after as many to warm up."""
    params = Path("params.yaml")
    config = load_section(params, "train", TrainConfig)
    shape = DrafterShape.model_validate_json(Path("data/drafter/shape.json").read_text(encoding="utf-8"))
    folders = {source: Path("data/features") / source for source in sorted(read_params(params)["sources"])}
    interface = read_interface(Path("data/target"))
    trainers = {name: Trainer(config, shape, interface, folders) for name in SIZES}
    progress = {name: Progressed() for name in SIZES}
    seconds = dict.fromkeys(SIZES, 0.0)
    anchors = dict.fromkeys(SIZES, 0)
    for step in range(2 * steps):
        for name, (length, anchor, slot) in SIZES.items():
            batches.LENGTH_MULTIPLE, batches.ANCHOR_MULTIPLE, objective.SLOT_MULTIPLE = length, anchor, slot
            start = time.perf_counter()
            record = trainers[name].step(progress[name])
            progress[name].step += 1
            if step >= steps:
                seconds[name] += time.perf_counter() - start
                anchors[name] += record["anchors"]
    table = Table("batch sizes", "ms a step", "anchors/s", "ratio")
    base = anchors["as drawn"] / seconds["as drawn"]
    for name in SIZES:
        rate = anchors[name] / seconds[name]
        table.add_row(name, f"{1000 * seconds[name] / steps:.0f}", f"{rate:.0f}", f"{rate / base:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
