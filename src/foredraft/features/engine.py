"""The ``extract`` stage: token shards -> feature shards, one for one, resumable between shards."""

from pathlib import Path

import torch
from torch import Tensor

from foredraft.artifacts import Manifest
from foredraft.features.checks import pad, shard_statistics, truth_check
from foredraft.features.config import ExtractConfig
from foredraft.features.layout import write_features
from foredraft.progress import Progress
from foredraft.provenance import versions
from foredraft.scratch import open_scratch, work_fingerprint
from foredraft.sources.config import FetchConfig
from foredraft.target.artifact import open_interface
from foredraft.target.config import TargetConfig
from foredraft.target.frozen import FrozenTarget, check_layer_ids, load_target
from foredraft.target.weights import checkpoint_folder
from foredraft.tokens.shards import TokenShard, open_tokens, read_shard

CONVENTION = "residual stream after 0-based decoder block k, before any final norm"
VERSIONS = ("torch", "transformers", "flash-linear-attention")
HEAD_CHUNK = 256


def extract(
    name: str,
    config: ExtractConfig,
    target: TargetConfig,
    fetch: FetchConfig,
    tokens: Path,
    interface: Path,
    out: Path,
) -> None:
    """Read the token shards of source ``name`` with the target and publish the ``features`` artefact ``out``.

    Raises:
        ValueError: taps out of range; the truth check fails; a state is not finite, or constant.
        ArtifactError: an input is missing or damaged.
    """
    source = open_tokens(tokens, name)
    interface_manifest = open_interface(interface)
    check_layer_ids(config.target_layer_ids, interface_manifest.facts["num_layers"])
    names = sorted(source.facts["shards"])
    work = {**config.model_dump(), "target": target.model_dump()}
    key = work_fingerprint("extract", work, {"tokens": source, "target": interface_manifest})
    with open_scratch(f"extract-{name}", key) as scratch:
        missing = [shard for shard in names if not scratch.has(shard)]
        total = sum(facts["tokens"] for facts in source.facts["shards"].values())
        left = sum(source.facts["shards"][shard]["tokens"] for shard in missing)
        with Progress(f"extract-{name}", total, "tokens", done=total - left) as progress:
            if missing:
                frozen = load_target(checkpoint_folder(target, fetch), target, config.target_layer_ids)
                first = read_shard(tokens / missing[0])
                report_truth(frozen, first, config.truth_check_documents)
            for file in missing:
                shard = read_shard(tokens / file)
                features = read_features(frozen, shard, config, progress)
                shard_statistics(features["target_hidden"], config.target_layer_ids, f"{name}/{file}")
                scratch.write(file, lambda path, features=features: write_features(features, path))  # type: ignore[misc]
        contract = {
            **source.contract,
            "target_layer_ids": list(config.target_layer_ids),
            "layer_id_convention": CONVENTION,
            "feature_storage": config.storage,
            "kernels": "torch",
            "versions": {package: found for package, found in versions().items() if package in VERSIONS},
        }
        manifest = Manifest(
            "features", contract=contract, counts=source.counts, facts={**source.facts, "top_k": config.top_k}
        )
        scratch.publish(out, manifest, names)


def report_truth(frozen: FrozenTarget, shard: TokenShard, count: int) -> None:
    """Run the truth check on the first documents of a shard and print what it found."""
    documents = [shard.document(i)[0] for i in range(min(count, len(shard)))]
    with torch.inference_mode():
        worst = truth_check(frozen, documents)
    print(f"truth check on {len(documents)} documents: " + ", ".join(f"{k} within {v:.2g}" for k, v in worst.items()))


@torch.inference_mode()
def read_features(
    frozen: FrozenTarget, shard: TokenShard, config: ExtractConfig, progress: Progress | None = None
) -> dict[str, Tensor]:
    """The tensors of one feature shard; see :mod:`foredraft.features.layout`."""
    hidden: list[Tensor | None] = [None] * len(shard)
    topk: list[tuple[Tensor, Tensor] | None] = [None] * len(shard)
    for batch in batches_by_tokens(shard, config.batch_tokens):
        documents = [shard.document(i) for i in batch]
        input_ids, mask = pad([ids for ids, _ in documents])
        taps, final = frozen.read(input_ids.to(frozen.device), mask.to(frozen.device))
        for row, (index, (ids, loss_mask)) in enumerate(zip(batch, documents, strict=True)):
            hidden[index] = taps[row, : len(ids)].to(torch.bfloat16).cpu()
            before = loss_mask.bool().nonzero()[:, 0] - 1  # the logits that predict a token stand one position earlier
            topk[index] = target_topk(frozen, final[row, before.clamp(min=0)], config.top_k)
            if progress:
                progress.advance(len(ids))
    return {
        "target_hidden": torch.cat([part for part in hidden if part is not None]),
        "input_ids": shard.input_ids,
        "loss_mask": shard.loss_mask,
        "offsets": shard.offsets,
        "topk_ids": torch.cat([part[0] for part in topk if part is not None]),
        "topk_logprobs": torch.cat([part[1] for part in topk if part is not None]),
    }


def target_topk(frozen: FrozenTarget, final: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` likeliest ids and their log-probabilities after each of ``(M, D)`` states, in chunks of the head."""
    ids, logprobs = [], []
    for chunk in final.split(HEAD_CHUNK):
        top = frozen.head(chunk).float().log_softmax(-1).topk(k)
        ids.append(top.indices.int().cpu())
        logprobs.append(top.values.cpu())
    return torch.cat(ids), torch.cat(logprobs)


def batches_by_tokens(shard: TokenShard, budget: int) -> list[list[int]]:
    """Group a shard's documents by length, so that rows times the longest row stay within ``budget``."""
    lengths = shard.offsets.diff().tolist()
    batches: list[list[int]] = []
    for index in sorted(range(len(shard)), key=lambda i: (-lengths[i], i)):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > budget:
            batches.append([])
        batches[-1].append(index)
    return batches
