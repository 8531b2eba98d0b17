"""Data preparation measured: curate, respond (answers kept) and prepare, beside SpecForge on the same rows.

usage: python -m bench.data [--rows 50000] [--more-rows 200000] [--peer-rows 10000] [--workers 2]     (make bench-data)

Our side runs the real stage commands, one process each, and their start-up, reading, hashing and writing count. Of
SpecForge's the call of ``build_eagle3_dataset`` alone is timed, without imports and without the reading of the JSON
Lines. Both use the same rows, tokenizer, length limit and number of workers, one after the other in one run. SpecForge
gets the first ``--peer-rows`` rows, since it needs many minutes for all of them; its rate does not depend on how many.
Memory is the sum over the process tree, shared pages divided among those that share them, sampled ten times a second.
The work needs about 5 GB in the temporary folder (``TMPDIR``) at 200,000 rows. Other work on the machine counts against
either side by the clock, so processor time is reported too, and the load before the run.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import click
import psutil
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML
from safetensors import safe_open

from bench.conversations import Pool, read_pool, write_corpus
from foredraft.artifacts import Manifest, publish, write_json
from foredraft.benchmarks.build import build_benchmarks
from foredraft.benchmarks.config import BenchmarksConfig
from foredraft.imports import ROOT
from foredraft.params import ConfigT, load_section, read_params
from foredraft.provenance import commit, versions
from foredraft.sources.config import FetchConfig
from foredraft.target.config import TargetConfig

STAGES = ("curate", "respond", "prepare")
PEER = ROOT / ".peers/specforge/bin/python"
MAX_LENGTH = 4096
SEED = 1
SAMPLE_SECONDS = 0.1
Ids = list[int]


@dataclass(frozen=True)
class Measured:
    """What one command took."""

    seconds: float
    cpu_seconds: float
    peak_mib: float
    output: str


@dataclass(frozen=True)
class Bench:
    """Where the run happens and with what."""

    folder: Path
    target: Path
    workers: int

    def environment(self) -> dict[str, str]:
        """Of every command; one thread a process, so that workers are what works in parallel."""
        return {
            **os.environ,
            "FOREDRAFT_WORKERS": str(self.workers),
            "FOREDRAFT_SCRATCH": str(self.folder / "scratch"),
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
        }


@click.command()
@click.option("--rows", default=50_000, show_default=True, help="Rows of the comparison.")
@click.option("--more-rows", default=200_000, show_default=True, help="Rows of the second run of our side; 0: none.")
@click.option("--peer-rows", default=10_000, show_default=True, help="Rows that SpecForge gets; 0: all.")
@click.option("--agree-rows", default=500, show_default=True, help="Rows whose ids and masks are compared.")
@click.option("--workers", default=2, show_default=True, help="Processes of either side.")
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "bench/results/data-cpu.json", show_default=True)
def main(rows: int, more_rows: int, peer_rows: int, agree_rows: int, workers: int, out: Path) -> None:
    """Measure, print the table and write the JSON file."""
    console = Console()
    load = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory(prefix="foredraft-bench-") as name:
        bench = Bench(Path(name), ready_target(Path(name)), workers)
        console.print("gathering text", highlight=False)
        pool = read_pool(ROOT / "params.yaml")
        build_benchmarks(
            section("benchmarks", BenchmarksConfig), section("fetch", FetchConfig), bench.folder / "benchmarks"
        )
        corpus = new_corpus(bench, rows, pool, console)
        ours = run_stages(bench, rows, console)
        peer, agreement = run_peer(bench, corpus, min(peer_rows or rows, rows), agree_rows, console)
        more = None
        if more_rows:
            # The disk need not hold both.
            shutil.rmtree(workspace(bench, rows))
            new_corpus(bench, more_rows, pool, console)
            more = run_stages(bench, more_rows, console)
    report = {
        **headline(ours, peer, more),
        "max_length": MAX_LENGTH,
        "workers": workers,
        "stages": {str(rows): ours, **({str(more_rows): more} if more else {})},
        "peer": peer,
        "agreement": agreement,
        **provenance(peer, load),
    }
    console.print(table(report))
    describe(report, console)
    write_json(out, report)


def run_stages(bench: Bench, rows: int, console: Console) -> dict[str, Any]:
    """Run our three stages over the corpus of ``rows`` rows: figures of each and of the whole."""
    place = workspace(bench, rows)
    folders = {name: str(place / name) for name in ("raw", "conversations", "responses", "tokens")}
    arguments = {
        "curate": ["--raw", folders["raw"], "--benchmarks", str(bench.folder / "benchmarks")],
        "respond": ["--conversations", folders["conversations"], "--target", str(bench.target)],
        "prepare": ["--responses", folders["responses"], "--target", str(bench.target)],
    }
    written = dict(zip(STAGES, ("conversations", "responses", "tokens"), strict=True))
    figures: dict[str, Any] = {}
    for stage in STAGES:
        console.print(f"{stage} {rows:,} rows", highlight=False)
        found = run_stage(bench, stage, ["bench", *arguments[stage], "--out", folders[written[stage]]])
        counts = manifest_of(Path(folders[written[stage]])).counts
        figures[stage] = {
            "seconds": found.seconds,
            "cpu_seconds": found.cpu_seconds,
            "peak_mib": found.peak_mib,
            "counts": counts,
        }
    tokens = sum(shard["tokens"] for shard in manifest_of(Path(folders["tokens"])).facts["shards"].values())
    total = {name: round(sum(figures[stage][name] for stage in STAGES), 2) for name in ("seconds", "cpu_seconds")}
    peak = max(figures[stage]["peak_mib"] for stage in STAGES)
    figures["all"] = {**total, "peak_mib": peak, "rows": rows, "tokens": tokens}
    for figure in figures.values():
        figure |= rates(rows, tokens, figure)
    return figures


def rates(rows: int, tokens: int, figure: dict[str, Any]) -> dict[str, float]:
    """By the clock, and by processor time: the clock counts what else the machine does."""
    return {
        "rows_per_s": round(rows / figure["seconds"], 1),
        "tokens_per_s": round(tokens / figure["seconds"]),
        "rows_per_cpu_s": round(rows / figure["cpu_seconds"], 1),
    }


def run_stage(bench: Bench, stage: str, arguments: list[str]) -> Measured:
    """Run one stage command, with a scratch folder of its own: nothing of an earlier run can be taken up."""
    command = [sys.executable, "-m", f"stages.{stage}", *arguments, "--params", str(params_file(bench.folder))]
    command += ["--metrics", str(bench.folder / f"metrics-{stage}.json")]
    found = measure(command, bench.environment())
    # The record of the run belongs to the pipeline's own stages, not to ours.
    for record in (ROOT / "data/.runs").glob(f"{stage}-bench.json"):
        record.unlink()
    return found


def run_peer(
    bench: Bench, corpus: Path, rows: int, agree_rows: int, console: Console
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time SpecForge on the first ``rows`` rows, and compare what both sides made of the first ``agree_rows``."""
    console.print(f"SpecForge {rows:,} rows", highlight=False)
    agree = bench.folder / "agree.jsonl"
    script = str(ROOT / "bench/specforge_peer.py")
    command = [str(PEER), "-W", "ignore", script, str(corpus), str(bench.target)]
    command += [str(rows), str(bench.workers), str(MAX_LENGTH), str(agree_rows), str(agree)]
    cache = bench.folder / "hf"
    environment = {
        **bench.environment(),
        "HF_DATASETS_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("PYTHONPATH")
    found = measure(command, environment)
    shutil.rmtree(cache, ignore_errors=True)
    peer = json.loads(found.output.strip().splitlines()[-1])
    peer |= {"peak_mib": found.peak_mib, **rates(peer["rows"], peer["tokens"], peer)}
    place = corpus.parent.parent
    return peer, compare(corpus, place, agree, special_ids(bench.target), agree_rows)


def compare(corpus: Path, place: Path, agree: Path, special: tuple[int, int], rows: int) -> dict[str, Any]:
    """Shares of the rows that both sides kept whose ids, and whose masks, are equal.

    SpecForge ends a conversation with the newline that the template writes behind the end-of-turn token, and supervises
    that newline after each answer. The target never says it: its turn is over with the end-of-turn token. So exact
    equality is not expected; the shares that count set that newline aside on SpecForge's side, and nothing else. A side
    that supervises the last answer only is equal in ``masks_equal_last_answer``.
    """
    kept = rows_kept(corpus, place / "conversations", rows)
    theirs = [json.loads(line) for line in agree.read_text(encoding="utf-8").splitlines()]
    bare = {digest(row["ids"]): row for row in theirs}
    for row in theirs:
        row["cut"], row["spoken"] = without_newline(row["ids"], row["mask"], special)
    wanted = bare.keys() | {digest(row["cut"]) for row in theirs}
    ours = {key: mask for key, mask in documents(place / "tokens") if key in wanted}
    both = [(row, ours[digest(row["cut"])]) for row in theirs if digest(row["cut"]) in ours]
    answers = {
        "ids_equal": sum(digest(row["ids"]) in ours for row in theirs),
        "ids_equal_but_last_newline": len(both),
        "masks_equal": sum(row["mask"] == mask for row, mask in both),
        "masks_equal_but_newlines": sum(row["spoken"] == mask for row, mask in both),
        "masks_equal_last_answer": sum(last_run(row["spoken"]) == mask for row, mask in both),
    }
    shares = {name: round(count / max(1, kept), 4) for name, count in answers.items()}
    return {"rows_compared": len(theirs), "rows_kept_by_both": kept, **shares}


def without_newline(ids: Ids, mask: Ids, special: tuple[int, int]) -> tuple[Ids, Ids]:
    """Take the newline behind end-of-turn tokens out of the mask, and out of the ids where they end with it."""
    end, newline = special
    spoken = [0 if place and ids[place] == newline and ids[place - 1] == end else bit for place, bit in enumerate(mask)]
    if ids[-2:] == [end, newline]:
        return ids[:-1], spoken[:-1]
    return ids, spoken


def last_run(mask: Ids) -> Ids:
    """The mask with its last run of ones alone."""
    end = next((place for place in range(len(mask), 0, -1) if mask[place - 1]), 0)
    start = end
    while start and mask[start - 1]:
        start -= 1
    return [0] * start + mask[start:]


def rows_kept(corpus: Path, conversations: Path, rows: int) -> int:
    """How many of the corpus' first ``rows`` rows the curated conversations hold, by what is said in them."""
    with corpus.open(encoding="utf-8") as lines:
        wanted = {said(json.loads(line)["conversations"]) for line in islice(lines, rows)}
    found = set()
    for path in sorted(conversations.glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(columns=["messages"], batch_size=1000):
            found |= wanted & {said(json.loads(text)) for text in batch.column(0).to_pylist()}
    return len(found)


def said(messages: Iterable[dict[str, Any]]) -> str:
    """Digest of who says what."""
    return hashlib.sha256(json.dumps([[turn["role"], turn["content"]] for turn in messages]).encode()).hexdigest()


def digest(ids: Iterable[int]) -> bytes:
    """Digest of token ids."""
    return hashlib.sha256(array("i", ids).tobytes()).digest()


def documents(folder: Path) -> Iterator[tuple[bytes, Ids]]:
    """Digest of the ids, and mask, of each document of our token shards."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as shard:
            ids, mask, offsets = (shard.get_tensor(name) for name in ("input_ids", "loss_mask", "offsets"))
        for start, end in pairwise(offsets):
            yield digest(ids[start:end].tolist()), mask[start:end].tolist()


def special_ids(target: Path) -> tuple[int, int]:
    """Ids of the end-of-turn token and of a newline."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    end, newline = tokenizer.encode("<|im_end|>\n", add_special_tokens=False).ids
    return end, newline


def measure(command: list[str], environment: dict[str, str]) -> Measured:
    """Run a command to its end: wall seconds, start-up included, and the largest memory of its process tree.

    Raises:
        click.ClickException: it failed; with the end of what it said.
    """
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as told,
        tempfile.TemporaryFile("w+", encoding="utf-8") as output,
    ):
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=told)
        peak, cpu = watch(process)
        seconds = time.perf_counter() - start
        told.seek(0)
        output.seek(0)
        if process.returncode:
            raise click.ClickException(f"{' '.join(command)}\n{told.read()[-3000:]}")
        return Measured(round(seconds, 2), round(cpu, 2), round(peak / 2**20, 1), output.read())


def watch(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """Look at a process tree until its root ends: the largest sum of its memory in bytes, and its processor seconds.

    Looking costs time of the cores that are measured, so it is never done for more than a tenth of the time.
    """
    peak, pause = 0, SAMPLE_SECONDS
    cpu: dict[int, float] = {}
    while True:
        try:
            process.wait(pause)
            return peak, sum(cpu.values())
        except subprocess.TimeoutExpired:
            start = time.perf_counter()
            peak = max(peak, look(process.pid, cpu))
            pause = max(SAMPLE_SECONDS, 9 * (time.perf_counter() - start))


def look(root: int, cpu: dict[int, float]) -> int:
    """Memory of a process and all below it, now; their processor seconds so far go into ``cpu``."""
    total = 0
    try:
        processes = [parent := psutil.Process(root), *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in processes:
        try:
            times = process.cpu_times()
            cpu[process.pid] = times.user + times.system
            total += process_bytes(process)
        except (psutil.Error, OSError):  # it ended meanwhile
            continue
    return total


def process_bytes(process: psutil.Process) -> int:
    """Proportional set size, where the kernel tells it; else what is the process's alone."""
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
    except (FileNotFoundError, PermissionError):
        return process.memory_full_info().uss
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:")), 0)


def new_corpus(bench: Bench, rows: int, pool: Pool, console: Console) -> Path:
    """Write the first ``rows`` conversations as a ``raw`` artefact, as ``fetch`` does, and the params; its JSON Lines."""
    console.print(f"writing {rows:,} conversations", highlight=False)
    raw = workspace(bench, rows) / "raw"
    with publish(raw, Manifest("raw", facts={"uri": "file:bench.jsonl", "sha256": None})) as folder:
        write_corpus(folder / "bench.jsonl", rows, SEED, pool)
    return raw / "bench.jsonl"


def params_file(folder: Path) -> Path:
    """The repository's params with one source, and limits that leave the rows alone; written once."""
    path = folder / "params.yaml"
    if path.exists():
        return path
    params = read_params(ROOT / "params.yaml")
    source = {"uri": "file:bench.jsonl", "kind": "general", "licence": "MIT", "format": "auto", "answers": "keep"}
    params["sources"] = {"bench": source}
    params["curate"] |= {"max_prompt_chars": 1_000_000, "contamination_words": 13, "max_skip_ratio": 1.0}
    params["respond"] |= {"max_prompt_tokens": 1_000_000}
    params["prepare"] |= {"max_length": MAX_LENGTH, "shard_tokens": 1 << 26}
    with path.open("w", encoding="utf-8") as stream:
        YAML(typ="safe", pure=True).dump(params, stream)
    return path


def ready_target(folder: Path) -> Path:
    """The pipeline's target, or one made here."""
    target = ROOT / "data/target"
    if (target / "manifest.json").is_file():
        return target
    from foredraft.target.interface import write_interface  # brings torch and Transformers

    write_interface(section("target", TargetConfig), section("fetch", FetchConfig), folder / "target")
    return folder / "target"


def section(name: str, model: type[ConfigT]) -> ConfigT:
    """A section of the repository's params."""
    return load_section(ROOT / "params.yaml", name, model)


def workspace(bench: Bench, rows: int) -> Path:
    """Folder of the artefacts of a corpus."""
    return bench.folder / f"rows-{rows}"


def manifest_of(folder: Path) -> Manifest:
    """The manifest of an artefact just written."""
    return Manifest.from_json((folder / "manifest.json").read_text(encoding="utf-8"))


def headline(ours: dict[str, Any], peer: dict[str, Any], more: dict[str, Any] | None) -> dict[str, Any]:
    """The figures that the benchmark is about; ``None`` where the larger corpus was left out."""
    peak, larger = ours["all"]["peak_mib"], more["all"]["peak_mib"] if more else None
    return {
        "rows": ours["all"]["rows"],
        "more_rows": more["all"]["rows"] if more else None,
        "peer_rows": peer["rows"],
        "rows_per_s": ours["all"]["rows_per_s"],
        "peer_rows_per_s": peer["rows_per_s"],
        "ratio": round(ours["all"]["rows_per_s"] / peer["rows_per_s"], 2),
        "ratio_of_cpu_time": round(ours["all"]["rows_per_cpu_s"] / peer["rows_per_cpu_s"], 2),
        "tokens": ours["all"]["tokens"],
        "tokens_per_s": ours["all"]["tokens_per_s"],
        "peer_tokens_per_s": peer["tokens_per_s"],
        # Named after the defaults; `rows` and `more_rows` say what they are.
        "peak_mib_50k": peak,
        "peak_mib_200k": larger,
        "memory_growth": round(larger / peak, 3) if larger else None,
        "peer_peak_mib": peer["peak_mib"],
    }


def provenance(peer: dict[str, Any], load: float) -> dict[str, Any]:
    """What ran, and on what."""
    revision, _, edits = commit().partition("+")
    names = ("python", "torch", "transformers", "tokenizers", "datasets")
    mine = {name: version for name, version in versions().items() if name in names}
    return {
        "commit": revision,
        "dirty": bool(edits),
        "versions": {**mine, "specforge": peer["versions"]["specforge"]},
        "hardware": {"cpu": cpu_model(), "cores": len(os.sched_getaffinity(0))},
        "load_before": load,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def cpu_model() -> str:
    """The processor's name, as the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def table(report: dict[str, Any]) -> Table:
    """One line a stage, one for the whole, one for SpecForge."""
    out = Table(
        "",
        "rows",
        "seconds",
        "rows/s",
        "rows/CPU s",
        "tokens/s",
        "peak MiB",
        title=f"Data preparation beside SpecForge {report['versions']['specforge']}",
    )
    for column in out.columns[1:]:
        column.justify = "right"
    for rows, figures in report["stages"].items():
        for name, figure in figures.items():
            add_line(out, name if name != "all" else "all three", int(rows), figure)
        out.add_section()
    add_line(out, "SpecForge", report["peer_rows"], report["peer"])
    return out


def add_line(out: Table, name: str, rows: int, figure: dict[str, Any]) -> None:
    """Add one line of figures."""
    speed = (figure["rows_per_s"], figure["rows_per_cpu_s"], figure["tokens_per_s"], figure["peak_mib"])
    out.add_row(name, f"{rows:,}", f"{figure['seconds']:.1f}", *(f"{value:,.0f}" for value in speed))


def describe(report: dict[str, Any], console: Console) -> None:
    """Say in words what the table does not show."""
    agreement, counts = report["agreement"], report["stages"][str(report["rows"])]
    lines = [
        f"{report['ratio']:.2f} times SpecForge's rows/s, {report['ratio_of_cpu_time']:.2f} times its rows a CPU second, "
        f"{report['workers']} workers each"
    ]
    if report["memory_growth"]:
        lines.append(f"memory: {report['memory_growth']:.2f} times as much for {report['more_rows']:,} rows")
    lines.append(
        f"of {agreement['rows_kept_by_both']} rows: ids equal {agreement['ids_equal_but_last_newline']:.1%}, masks equal "
        f"{agreement['masks_equal_but_newlines']:.1%} (on the last answer {agreement['masks_equal_last_answer']:.1%}), but "
        "for the newline that a template writes behind an answer"
    )
    lines += [f"{stage} skipped {skipped}" for stage in STAGES if (skipped := counts[stage]["counts"]["skipped"])]
    console.print("\n".join(lines), highlight=False)


if __name__ == "__main__":
    main()
