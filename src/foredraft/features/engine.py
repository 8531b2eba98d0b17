"""The ``extract`` stage: token shards -> feature shards, on every GPU there is, resumable between shards."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from foredraft.artifacts import Manifest, require_same_contract, write_json
from foredraft.features.batching import ShardPlan, plan_shards
from foredraft.features.checks import as_record, truth_check
from foredraft.features.config import ExtractConfig
from foredraft.features.reading import Reader
from foredraft.features.storing import Store, read_sums, statistics
from foredraft.launch import launch, node_count, place, process_count
from foredraft.progress import Progress
from foredraft.provenance import versions
from foredraft.scratch import Scratch, open_scratch, work_fingerprint
from foredraft.sources.config import FetchConfig
from foredraft.target.artifact import open_interface
from foredraft.target.config import TargetConfig
from foredraft.target.frozen import FrozenTarget, check_layer_ids, load_target, require_inner_taps
from foredraft.target.kernels import accelerate, choose_tools, describe
from foredraft.target.weights import checkpoint_folder
from foredraft.tokens.shards import open_tokens
from foredraft.tokens.shards import read_shard as read_tokens

CONVENTION = "residual stream after 0-based decoder block k, before any final norm"
VERSIONS = ("torch", "transformers")
RESTARTS = 3
"""How often the processes of a machine are started again when one died."""
TRUTH = "truth.json"


@dataclass(frozen=True)
class Job:
    """What every process that extracts needs to know; plain values, since it travels to other processes.

    Attributes:
        facts: of the target.
        plans: shards to make.
        sample: shards whose first documents the truth check reads.
        threads: of each process on a CPU, where the last bit depends on them.
    """

    name: str
    config: ExtractConfig
    target: TargetConfig
    fetch: FetchConfig
    tokens: Path
    scratch: Path
    facts: dict[str, Any]
    plans: tuple[ShardPlan, ...]
    sample: tuple[ShardPlan, ...]
    threads: int


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
        ValueError: taps out of range, or on the last block; the disk is too small; the truth check fails; a state is not
            finite, or constant.
        ArtifactError: an input is missing, damaged, or of another target.
    """
    source, interface_manifest = open_tokens(tokens, name), open_interface(interface, target)
    require_same_contract(interface_manifest.contract, source.contract, tokens, f"dvc repro prepare@{name}")
    facts = interface_manifest.facts
    check_layer_ids(config.target_layer_ids, facts["num_layers"])
    require_inner_taps(config.target_layer_ids, facts["num_layers"])
    if join and node_count() == 1:
        raise ValueError("--join helps another machine: set FOREDRAFT_NODES and FOREDRAFT_RENDEZVOUS as there")
    check_tokens(tokens, sorted(source.facts["shards"]), facts["vocab_rows"])
    plans = plan_shards(tokens, sorted(source.facts["shards"]), config.batch_tokens, config.shard_tokens)
    kernels = describe(config.kernels)
    threads = torch.get_num_threads()
    work = {**config.model_dump(), "target": target.model_dump(), "kernels": kernels, "versions": kept_versions()}
    if kernels["device"] == "cpu":
        work["threads"] = threads
    key = work_fingerprint("extract", work, {"tokens": source, "target": interface_manifest})
    with open_scratch(f"extract-{name}", key, shared=join) as scratch:
        missing = tuple(plan for plan in plans if not finished(scratch, plan))
        job = Job(name, config, target, fetch, tokens, scratch.path, facts, missing, tuple(plans), threads)
        if missing or not (scratch.path / TRUTH).is_file():
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
        "versions": kept_versions(),
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
    launch(read_launched_share, job, f"extract-{job.name}", job.scratch, processes, node_count(), RESTARTS)


def read_launched_share(job: Job) -> None:
    """What a process does that PyTorch's launcher started."""
    rank, _, device = place()
    if device is None:
        torch.set_num_threads(job.threads)
    read_share(job, rank, device)


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
    check_target(frozen, job.facts)
    documents = (ids for plan in job.sample for ids, _ in plan.read(job.tokens))
    checks = truth_check(frozen, list(islice(documents, job.config.truth_check_documents)))
    if keep_record:
        write_json(job.scratch / TRUTH, as_record(checks))
    return frozen


def check_target(frozen: FrozenTarget, facts: dict[str, Any]) -> None:
    """Refuse a checkpoint that is not the one whose facts the ``target`` stage kept.

    Raises:
        ValueError: names the first fact that differs.
    """
    found = {
        "architecture": type(frozen.model).__name__,
        "num_layers": len(frozen.blocks),
        "hidden_size": frozen.embeddings.embedding_dim,
        "vocab_rows": frozen.embeddings.num_embeddings,
    }
    for key, value in found.items():
        if value != facts[key]:
            raise ValueError(
                f"the target has {key} = {value}, data/target was made of one with {facts[key]}: dvc repro target"
            )


def check_tokens(folder: Path, names: list[str], vocab_rows: int) -> None:
    """Refuse token shards that the target cannot be given.

    Raises:
        ValueError: there are none; an id has no embedding; a document's first token is supervised, which nothing precedes.
    """
    if not names:
        raise ValueError(f"{folder} holds no token shard")
    for name in names:
        shard = read_tokens(folder / name)
        strange = ((shard.input_ids < 0) | (shard.input_ids >= vocab_rows)).nonzero()
        if len(strange):
            place = int(strange[0])
            document = int(torch.searchsorted(shard.offsets, place, right=True)) - 1
            raise ValueError(
                f"{name}: document {document} has id {int(shard.input_ids[place])}, the target {vocab_rows} embeddings"
            )
        if bool(shard.loss_mask[shard.offsets[:-1]].any()):
            document = int(shard.loss_mask[shard.offsets[:-1]].nonzero()[0])
            raise ValueError(
                f"{name}: the first token of document {document} is supervised: nothing before it could say it"
            )


def kept_versions() -> dict[str, str]:
    """Versions that decide the last bit of a state."""
    return {package: found for package, found in versions().items() if package in VERSIONS}


def finished(scratch: Scratch, plan: ShardPlan) -> bool:
    """Whether a shard and its sums are there, and as they were when they were finished."""
    return read_sums(scratch.path, plan.name) is not None and scratch.has(plan.name)


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
    print(f"extract-{name}: {needed / 2**20:,.0f} MiB to write in {scratch}, {free / 2**20:,.0f} MiB free")
    if needed > free:
        raise ValueError(
            f"sources.{name}: features need {needed / 2**20:,.0f} MiB, {scratch} has {free / 2**20:,.0f} MiB: make space, "
            "set FOREDRAFT_SCRATCH to another disk, take extract.storage: float8_e4m3fn, or fewer taps"
        )
