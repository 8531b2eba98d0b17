"""The ``extract`` stage: token shards -> feature shards, on every GPU there is, resumable between shards."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from foredraft.artifacts import ArtifactError, Manifest, write_atomic, write_json
from foredraft.features.batching import ShardPlan, plan_shards
from foredraft.features.checks import as_record, truth_check
from foredraft.features.config import ExtractConfig
from foredraft.features.reading import Reader
from foredraft.features.storing import Store, statistics, statistics_path
from foredraft.launch import launch, node_count, place, process_count
from foredraft.progress import Progress
from foredraft.provenance import versions
from foredraft.scratch import Scratch, open_scratch, work_fingerprint
from foredraft.sources.config import FetchConfig
from foredraft.target.artifact import open_interface
from foredraft.target.config import TargetConfig
from foredraft.target.frozen import FrozenTarget, check_layer_ids, load_target
from foredraft.target.kernels import accelerate, choose_tools, describe
from foredraft.target.weights import checkpoint_folder
from foredraft.tokens.shards import open_tokens

CONVENTION = "residual stream after 0-based decoder block k, before any final norm"
VERSIONS = ("torch", "transformers")
RESTARTS = 3
"""How often the processes of a machine are started again when one died."""
TRUTH = "truth.json"
REFUSED = "refused-"


@dataclass(frozen=True)
class Job:
    """What every process that extracts needs to know; plain values, since it travels to other processes."""

    name: str
    config: ExtractConfig
    target: TargetConfig
    fetch: FetchConfig
    tokens: Path
    scratch: Path
    plans: tuple[ShardPlan, ...]


def extract(
    name: str,
    config: ExtractConfig,
    target: TargetConfig,
    fetch: FetchConfig,
    tokens: Path,
    interface: Path,
    out: Path,
    join: bool = False,
) -> dict[str, Any]:
    """Read the token shards of source ``name`` with the target and publish the ``features`` artefact ``out``.

    Args:
        join: help another machine that does this, on the scratch folder of both, and leave publishing to it.

    Returns:
        its account, in documents.

    Raises:
        ValueError: taps out of range; the disk is too small; the truth check fails; a state is not finite, or constant.
        ArtifactError: an input is missing or damaged.
    """
    source, interface_manifest = open_tokens(tokens, name), open_interface(interface)
    facts = interface_manifest.facts
    check_layer_ids(config.target_layer_ids, facts["num_layers"])
    plans = plan_shards(tokens, sorted(source.facts["shards"]), config.batch_tokens, config.shard_tokens)
    kernels = describe(config.kernels)
    work = {**config.model_dump(), "target": target.model_dump(), "kernels": kernels}
    key = work_fingerprint("extract", work, {"tokens": source, "target": interface_manifest})
    with open_scratch(f"extract-{name}", key, shared=join) as scratch:
        missing = tuple(plan for plan in plans if not finished(scratch, plan))
        job = Job(name, config, target, fetch, tokens, scratch.path, missing)
        if missing:
            require_space(scratch.path, sum(plan.tokens for plan in missing) * bytes_per_token(config, facts), name)
            read_all(job, process_count())
        if join:
            return {}
        if left := [plan.name for plan in missing if not finished(scratch, plan)]:
            raise ValueError(f"sources.{name}: {left[0]} is being made by another process: run it again")
        manifest = describe_features(config, source, plans, kernels, scratch, facts["hidden_size"])
        scratch.publish(out, manifest, [plan.name for plan in plans])
        truth = json.loads((scratch.path / TRUTH).read_text(encoding="utf-8"))
    padded = sum(plan.padded_tokens for plan in plans)
    return {
        **manifest.counts,
        **{key: manifest.facts[key] for key in ("tokens", "supervised", "statistics")},
        "padding": round(1 - manifest.facts["tokens"] / padded, 4),
        "truth": truth,
    }


def describe_features(
    config: ExtractConfig,
    source: Manifest,
    plans: list[ShardPlan],
    kernels: dict[str, str],
    scratch: Scratch,
    hidden_size: int,
) -> Manifest:
    """The manifest of the features: contract, account, and what readers need."""
    contract = {
        **source.contract,
        "target_layer_ids": list(config.target_layer_ids),
        "layer_id_convention": CONVENTION,
        "feature_storage": config.storage,
        "kernels": kernels,
        "versions": {package: found for package, found in versions().items() if package in VERSIONS},
    }
    documents = sum(len(plan.lengths) for plan in plans)
    counts = {"rows_in": source.counts["rows_out"], "rows_out": documents, "skipped": {}}
    assert counts["rows_in"] == documents, f"{counts['rows_in']} documents in, {documents} out"
    names = [plan.name for plan in plans]
    facts = {
        "shards": {plan.name: {"documents": len(plan.lengths), "tokens": plan.tokens} for plan in plans},
        "tokens": sum(plan.tokens for plan in plans),
        "supervised": source.facts["supervised"],
        "lengths": source.facts["lengths"],
        "top_k": config.top_k,
        "statistics": statistics(scratch.path, names, config.target_layer_ids, hidden_size),
    }
    return Manifest("features", contract=contract, counts=counts, facts=facts)


def read_all(job: Job, processes: int) -> None:
    """Make every shard of the job: in this process, or in several on one machine or more."""
    if processes == 1 and node_count() == 1:
        read_share(job)
        return
    for old in job.scratch.glob(f"{REFUSED}*"):
        old.unlink()
    launch(read_launched_share, job, f"extract-{job.name}", job.scratch.name, processes, node_count(), RESTARTS)
    for refused in job.scratch.glob(f"{REFUSED}*"):
        raise ValueError(refused.read_text(encoding="utf-8"))


def read_launched_share(job: Job) -> None:
    """What a process does that PyTorch's launcher started; what is wrong with the data is told, not tried again."""
    rank, _, device = place()
    try:
        read_share(job, rank, device)
    except (ValueError, ArtifactError) as error:
        write_atomic(job.scratch / f"{REFUSED}{rank}", str(error))


def read_share(job: Job, rank: int | None = None, device: str | None = None) -> None:
    """Make shards until none is left that nobody else makes.

    A shard belongs to the process that holds its lock, which dies with the process: nothing is assigned beforehand, so a
    slow or dead process delays no other.
    """
    scratch = Scratch(job.scratch)
    title = f"extract-{job.name}" + ("" if rank is None else f"-{rank}")
    total = sum(plan.tokens for plan in job.plans)
    with Progress(title, total, "tokens") as progress:
        frozen = ready_target(job, device, keep_record=not rank)
        reader = Reader(frozen, getattr(torch, job.config.storage), job.config.top_k)
        stream = torch.cuda.Stream(frozen.device) if frozen.device.type == "cuda" else None
        with Store(scratch, job.name, job.config.target_layer_ids, progress.advance) as store:
            for plan in job.plans:
                claim = FileLock(scratch.path / f"{plan.name}.claim", thread_local=False)
                try:
                    claim.acquire(timeout=0)
                except Timeout:
                    continue  # another process makes it
                if finished(scratch, plan):
                    claim.release()
                    continue
                read_shard(reader, store, plan, plan.read(job.tokens), stream, claim.release)


def read_shard(
    reader: Reader,
    store: Store,
    plan: ShardPlan,
    documents: list[tuple[Tensor, Tensor]],
    stream: torch.cuda.Stream | None = None,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Read the documents of a shard and hand them to the store; ``then`` is called when the shard is there."""
    shard, start = store.begin(plan, documents), 0
    for batch in plan.batches:
        reading = reader.read(documents[start : start + len(batch)])
        store.put(shard, reading.to_host(stream))
        start += len(batch)
    store.end(shard, then)


def ready_target(job: Job, device: str | None, keep_record: bool) -> FrozenTarget:
    """Load the target, with the blocks that this machine has, and check it on documents of the first shard."""
    folder = checkpoint_folder(job.target, job.fetch)
    frozen = load_target(folder, job.target, job.config.target_layer_ids, device)
    if job.config.kernels == "auto":
        fast = accelerate(frozen, choose_tools())
        print(f"fast blocks: {fast} of {len(frozen.blocks)}")
    documents = job.plans[0].read(job.tokens)[: job.config.truth_check_documents]
    checks = truth_check(frozen, [ids for ids, _ in documents])
    if keep_record:
        write_json(job.scratch / TRUTH, as_record(checks))
    return frozen


def finished(scratch: Scratch, plan: ShardPlan) -> bool:
    """Whether a shard and its sums are there, and as they were when they were finished."""
    return statistics_path(scratch.path, plan.name).is_file() and scratch.has(plan.name)


def bytes_per_token(config: ExtractConfig, facts: dict[str, Any]) -> int:
    """What a token takes on disk, at most."""
    taps, size = len(config.target_layer_ids), getattr(torch, config.storage).itemsize
    scale = 4 * taps if config.storage == "float8_e4m3fn" else 0
    return int(taps * facts["hidden_size"] * size + scale + 8 * config.top_k + 5)


def require_space(scratch: Path, needed: int, name: str) -> None:
    """Refuse work that the disk cannot hold, before it starts.

    Raises:
        ValueError: names what is needed, what is free, and what would need less.
    """
    free = shutil.disk_usage(scratch).free
    print(f"extract-{name}: {needed / 2**30:.2f} GiB to write in {scratch}, {free / 2**30:.1f} GiB free")
    if needed > free:
        raise ValueError(
            f"sources.{name}: features need {needed / 2**30:.1f} GiB, {scratch} has {free / 2**30:.1f} GiB: make space, "
            "set FOREDRAFT_SCRATCH to another disk, take extract.storage: float8_e4m3fn, or fewer taps"
        )
