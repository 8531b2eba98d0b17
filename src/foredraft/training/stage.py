"""The ``train`` stage: features -> a drafter, by one process or by several that PyTorch's launcher starts."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from foredraft.artifacts import ArtifactError, Manifest, file_digest, require_same_contract, write_json
from foredraft.devices import default_device
from foredraft.drafter.config import DrafterShape
from foredraft.launch import launch, local_rank, node_count, place, process_count
from foredraft.layouts.zlab import WEIGHTS as ZLAB_WEIGHTS
from foredraft.provenance import commit
from foredraft.scratch import Scratch, open_scratch, work_fingerprint
from foredraft.target.interface import read_interface
from foredraft.training.checkpoint import Progressed, load_checkpoint
from foredraft.training.config import TrainConfig
from foredraft.training.data import FeatureData, open_all_features
from foredraft.training.ranks import Ranks
from foredraft.training.trainer import WEIGHTS, Trainer

SHAPE = "shape.json"
SAMPLE = "sample.safetensors"
SAMPLE_TOKENS = 64
RESTARTS = 3
"""How often the processes of a machine are started again, from the last checkpoint, when one died."""


def train(
    config: TrainConfig,
    features: dict[str, Path],
    target: Path,
    out: Path,
    metrics: Path,
    live: Path,
    join: bool = False,
) -> None:
    """Train on the features of all sources and publish the ``drafter`` artefact, its metrics and its curves.

    Args:
        features: folder of each source.
        live: where DVCLive keeps the curves.
        join: help another machine that does this, on the scratch folder of both, and leave publishing to it.

    Raises:
        ArtifactError: an input is missing, damaged, or of another contract.
        ValueError: no documents, an unusable mask token, too many non-finite steps.
    """
    if config.float8 != "none" and default_device() == "cpu":
        raise ValueError(f"train.float8 = {config.float8} needs a GPU; here it is none")
    manifests = open_all_features(features)
    interface = read_interface(target)
    origins = {source: manifest.contract["response_origin"] for source, manifest in manifests.items()}
    contract = {**next(iter(manifests.values())).contract, "response_origin": origins}
    require_same_contract(interface.manifest.contract, contract, target, "dvc repro target extract")
    facts = interface.manifest.facts
    shape = DrafterShape(
        choice=config.drafter,
        hidden_size=facts["hidden_size"],
        vocab_rows=facts["vocab_rows"],
        target_layer_ids=tuple(contract["target_layer_ids"]),
        num_target_layers=facts["num_layers"],
        rms_norm_eps=facts["rms_norm_eps"],
        rope_theta=facts["rope_theta"],
        max_position_embeddings=facts["max_position_embeddings"],
    )
    work = config.model_dump() | {"started_from": started_from(config)}
    key = work_fingerprint("train", work, {**manifests, "target": interface.manifest})
    identity = {
        "block_size": config.drafter.block_size,
        "mask_token_id": config.drafter.mask_token_id,
        "target_layer_ids": list(shape.target_layer_ids),
        "target": contract["target"],
        "data": {source: manifest.fingerprint for source, manifest in manifests.items()},
    }
    if join and node_count() == 1:
        raise ValueError("--join helps another machine: set FOREDRAFT_NODES and FOREDRAFT_RENDEZVOUS as there")
    with open_scratch("train", key, shared=join) as scratch:
        job = Job(
            config, shape, features, target, identity, scratch.path, None if join else live, torch.get_num_threads()
        )
        processes = process_count()
        if processes == 1 and node_count() == 1:
            train_share(job, Ranks(torch.device(default_device())))
        else:
            launch(train_launched_share, job, "train", scratch.path, processes, node_count(), RESTARTS)
        if join:
            return
        progressed, state = load_checkpoint(scratch.path, identity)
        scratch.write(SHAPE, lambda path: path.write_text(shape.model_dump_json(indent=1) + "\n", encoding="utf-8"))
        scratch.write(SAMPLE, lambda path: save_file(sample_of(features), path))
        choice = config.drafter
        counts = {split: len(FeatureData(features, split)) for split in ("train", "validation")}
        manifest = Manifest(
            "drafter",
            contract={**contract, "block_size": choice.block_size, "mask_token_id": choice.mask_token_id},
            counts={"documents": counts["train"], "validation_documents": counts["validation"]},
            facts={"best": progressed.best},
        )
        scratch.publish(out, manifest, [WEIGHTS, SHAPE, SAMPLE])
    parameters = sum(tensor.numel() for tensor in state["drafter"].values())
    write_json(metrics, summary(progressed, counts["train"], parameters))


def sample_of(features: dict[str, Path]) -> dict[str, torch.Tensor]:
    """The beginning of a held-out document, which ``export`` lets the written files draft behind."""
    document = FeatureData(features, "validation").document(0)
    part = slice(min(SAMPLE_TOKENS, len(document.input_ids)))
    states = document.target_hidden[part].clone()
    return {"input_ids": document.input_ids[part].clone(), "target_hidden": states}


@dataclass(frozen=True)
class Job:
    """What every process that trains needs to know; plain values, since it travels to other processes.

    Attributes:
        target: the artefact's folder.
        threads: of each process on a CPU, where the last bit depends on them.
    """

    config: TrainConfig
    shape: DrafterShape
    features: dict[str, Path]
    target: Path
    identity: dict[str, Any]
    scratch: Path
    live: Path | None
    threads: int


def train_launched_share(job: Job) -> None:
    """What a process does that PyTorch's launcher started."""
    rank, world, cuda = place()
    device = torch.device(cuda or "cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(job.threads)
    if local_rank() > 0:
        job = replace(job, live=None)
    torch.distributed.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    train_share(job, Ranks(device, rank, world))
    torch.distributed.destroy_process_group()  # not where something is wrong: the others may not come to it


def train_share(job: Job, ranks: Ranks) -> None:
    """This process's part of the training, to the end; the last checkpoint tells how it went."""
    trainer = Trainer(job.config, job.shape, read_interface(job.target), job.features, job.identity, ranks, job.live)
    trainer.run(Scratch(job.scratch))


def started_from(config: TrainConfig) -> str | None:
    """Digest of the weights that a warm start takes; it is not among what DVC watches.

    Raises:
        ArtifactError: there are none.
    """
    if config.start in ("random", "target"):
        return None
    weights = Path(config.start) / ZLAB_WEIGHTS
    if not weights.is_file():
        raise ArtifactError(weights, "does not exist", "train.start is random, target, or a drafter's folder")
    return file_digest(weights)


def summary(progressed: Progressed, documents: int, parameters: int) -> dict[str, Any]:
    """What ``dvc metrics show`` shows of a run."""
    seconds, waited = (sum(record[key] for record in progressed.curve) for key in ("seconds", "waited"))
    return {
        "loss": next((record["loss"] for record in reversed(progressed.curve) if math.isfinite(record["loss"])), None),
        "steps": progressed.step,
        "skipped_steps": progressed.skipped,
        "documents": documents,
        "parameters": parameters,
        "anchors_per_second": sum(record["anchors"] for record in progressed.curve) / seconds,
        "waited_for_data": waited / seconds,
        "best_step": progressed.best["step"],
        "val": progressed.validation,
        "commit": commit(),
    }
