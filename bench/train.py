"""Anchors a second of training on this machine, beside the first version of this pipeline on the same features.

usage: make bench-train     (after make repro, whose data/features and data/target it reads; for GPUs: bench/train_gpu.py)

All sides are processes of their own and take turns of a few steps each. The first version comes out of git and runs twice:
by its own params, and with as many tokens and anchors a step as now. Time includes reading the documents and drawing their
anchors.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST = "6219a51"
"""The commit at which the pipeline first ran as a whole."""
FIRST_VERSION = "first version"
ROUNDS, STEPS, WARM_UP = 6, 15, 10
OUT = ROOT / "bench/results/train-cpu.json"


def main() -> None:
    """Measure, print and write."""
    from rich.console import Console
    from rich.table import Table

    from foredraft.artifacts import write_json
    from foredraft.provenance import commit, versions

    with tempfile.TemporaryDirectory() as folder:
        command = ["git", "archive", FIRST, "src", "params.yaml"]
        archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        sides = {
            FIRST_VERSION: Side(Path(folder), Path(folder)),
            "first version, steps as now": Side(Path(folder), ROOT),
            "now": Side(ROOT, ROOT),
        }
        for side in sides.values():
            side.run(WARM_UP)
        turns = [{name: side.run(STEPS) for name, side in sides.items()} for _ in range(ROUNDS)]
    rates = {name: sum(t[name][0] for t in turns) / sum(t[name][1] for t in turns) for name in sides}
    ratios = {
        name: [t["now"][0] / t["now"][1] / (t[name][0] / t[name][1]) for t in turns] for name in sides if name != "now"
    }
    report = {
        "anchors_per_s": {name: round(rate) for name, rate in rates.items()},
        "ratio": {name: round(rates["now"] / rates[name], 2) for name in ratios},
        "ratio_by_round": {name: [round(ratio, 2) for ratio in found] for name, found in ratios.items()},
        "first_version": FIRST,
        "commit": commit(),
        "versions": versions(),
        "hardware": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
    }
    write_json(OUT, report)
    table = Table("", "anchors/s", "now is so many times that", "by round")
    for name, rate in rates.items():
        found = ratios.get(name, [])
        table.add_row(
            name, f"{rate:,.0f}", *([f"{report['ratio'][name]}", str(report["ratio_by_round"][name])] if found else [])
        )
    Console().print(table)


class Side:
    """A process that trains by the source in ``tree``, and by the params in ``chosen``, some steps at a time."""

    def __init__(self, tree: Path, chosen: Path):
        environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--side", str(chosen / "params.yaml")],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, steps: int) -> tuple[int, float]:
        """Anchors and seconds of the next ``steps``."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                found = json.loads(line)
                return found["anchors"], found["seconds"]
        raise SystemExit("a side of the bench ended early")


def side(path: Path) -> None:
    """Make a trainer of whichever version is on the path, and run as many steps as each line of input says."""
    from foredraft.drafter.config import DrafterShape
    from foredraft.params import read_params
    from foredraft.target.interface import read_interface
    from foredraft.training.checkpoint import Progressed
    from foredraft.training.config import TrainConfig
    from foredraft.training.trainer import Trainer

    params, chosen = read_params(Path("params.yaml")), read_params(path)["train"]
    first = "anchors_per_step" in TrainConfig.model_fields
    if first and "anchors_per_step" not in chosen:
        loss, anchors = chosen["loss"], chosen["anchors_per_row"]
        kept = {name: loss[name] for name in ("labels", "weights", "gamma", "alpha")}
        chosen = {name: value for name, value in chosen.items() if name in TrainConfig.model_fields}
        chosen |= {"loss": kept | {"soft": loss["kl"]}, "anchors_per_step": anchors}
        chosen["schedule"] = "cosine"  # it had no other that the params may ask for, and a rate takes no time
    shape = DrafterShape.model_validate_json(Path("data/drafter/shape.json").read_text(encoding="utf-8"))
    folders = {source: Path("data/features") / source for source in sorted(params["sources"])}
    trainer = Trainer(
        TrainConfig.model_validate_json(json.dumps(chosen)), shape, read_interface(Path("data/target")), folders
    )
    progressed = Progressed()
    for line in sys.stdin:
        start, anchors = time.perf_counter(), 0
        for _ in range(int(line)):
            arguments = [] if first else [trainer.rows_of(progressed.step)]
            anchors += trainer.step(progressed, *arguments)["anchors"]
            progressed.step += 1
        print(json.dumps({"anchors": anchors, "seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    side(Path(sys.argv[2])) if "--side" in sys.argv else main()
