"""The ``extract`` stage: token shards -> feature shards, resumable between shards."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
) -> dict[str, Any]:
    """Read the token shards of source ``name`` with the target and publish the ``features`` artefact ``out``.

    Returns:
        its account, in documents.

    Raises:
        ValueError: taps out of range; the truth check fails; a state is not finite, or constant.
        ArtifactError: an input is missing or damaged.
    """
    source = open_tokens(tokens, name)
    interface_manifest = open_interface(interface)
    check_layer_ids(config.target_layer_ids, interface_manifest.facts["num_layers"])
    cuts = cut_shards(tokens, sorted(source.facts["shards"]), config.shard_tokens)
    work = {**config.model_dump(), "target": target.model_dump()}
    key = work_fingerprint("extract", work, {"tokens": source, "target": interface_manifest})
    with open_scratch(f"extract-{name}", key) as scratch:
        missing = [cut for cut in cuts if not scratch.has(cut.name)]
        total, left = (sum(cut.tokens for cut in part) for part in (cuts, missing))
        with Progress(f"extract-{name}", total, "tokens", done=total - left) as progress:
            if missing:
                frozen = load_target(checkpoint_folder(target, fetch), target, config.target_layer_ids)
                report_truth(frozen, missing[0].read(tokens), config.truth_check_documents)
            for cut in missing:
                features = read_features(frozen, cut.read(tokens), config, progress)
                shard_statistics(features["target_hidden"], config.target_layer_ids, f"{name}/{cut.name}")
                scratch.write(cut.name, lambda path, features=features: write_features(features, path))  # type: ignore[misc]
        contract = {
            **source.contract,
            "target_layer_ids": list(config.target_layer_ids),
            "layer_id_convention": CONVENTION,
            "feature_storage": config.storage,
            "kernels": "torch",
            "versions": {package: found for package, found in versions().items() if package in VERSIONS},
        }
        documents = sum(cut.end - cut.start for cut in cuts)
        counts = {"rows_in": source.counts["rows_out"], "rows_out": documents, "skipped": {}}
        assert counts["rows_in"] == documents, f"{name}: {counts['rows_in']} documents in, {documents} out"
        facts = {"shards": {cut.name: {"documents": cut.end - cut.start, "tokens": cut.tokens} for cut in cuts}}
        sizes = {key: source.facts[key] for key in ("tokens", "supervised", "lengths")}
        manifest = Manifest(
            "features", contract=contract, counts=counts, facts={**facts, **sizes, "top_k": config.top_k}
        )
        scratch.publish(out, manifest, [cut.name for cut in cuts])
    return {**counts, "tokens": source.facts["tokens"], "supervised": source.facts["supervised"]}


@dataclass(frozen=True)
class Cut:
    """The documents of one feature shard: ``[start, end)`` of a token shard."""

    name: str
    source: str
    start: int
    end: int
    tokens: int

    def read(self, folder: Path) -> TokenShard:
        """Its documents."""
        return read_shard(folder / self.source).part(self.start, self.end)


def cut_shards(folder: Path, names: list[str], budget: int) -> list[Cut]:
    """Cut token shards into runs of documents of about ``budget`` tokens; each split is numbered through."""
    cuts: list[Cut] = []
    for source in names:
        split = source.rpartition("-")[0]
        offsets = read_shard(folder / source).offsets.tolist()
        start = 0
        for end in range(1, len(offsets)):
            last = end == len(offsets) - 1
            if last or offsets[end + 1] - offsets[start] > budget:
                number = sum(cut.name.startswith(f"{split}-") for cut in cuts)
                name = f"{split}-{number:05d}.safetensors"
                cuts.append(Cut(name, source, start, end, offsets[end] - offsets[start]))
                start = end
    return cuts


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
