"""Small artefacts made by the library's own code on a tiny target."""

from pathlib import Path

import torch

from foredraft.artifacts import Manifest, publish
from foredraft.features.config import ExtractConfig
from foredraft.features.engine import read_features
from foredraft.features.layout import write_features
from foredraft.target.frozen import FrozenTarget
from foredraft.target.interface import Interface
from foredraft.tokens.shards import TokenShard, pack
from tests.conftest import HIDDEN, TAPS, VOCABULARY, tiny_llama

EXTRACT = ExtractConfig(
    target_layer_ids=TAPS, top_k=4, batch_tokens=64, shard_tokens=200, storage="bfloat16", truth_check_documents=2
)


def some_documents(count: int, seed: int, low: int = 10, high: int = 30) -> TokenShard:
    """Documents of random ids, supervised from the fourth token on."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for _ in range(count):
        length = int(torch.randint(low, high, (1,), generator=generator))
        ids = torch.randint(6, VOCABULARY, (length,), generator=generator).tolist()
        documents.append((ids, [0] * 4 + [1] * (length - 4)))
    return pack(documents)


def make_features(folder: Path, target: FrozenTarget, documents: int = 12) -> Path:
    """A features artefact with two train shards and one validation shard."""
    files = {"train-00000": (documents, 1), "train-00001": (documents, 2), "validation-00000": (4, 3)}
    with publish(
        folder, Manifest("features", contract={"target_layer_ids": list(TAPS), "response_origin": "keep"})
    ) as building:
        for name, (count, seed) in files.items():
            shard = read_features(target, some_documents(count, seed), EXTRACT)
            write_features(shard, building / f"{name}.safetensors")
    return folder


def make_interface(target: FrozenTarget) -> Interface:
    """What the target stage keeps, of a tiny target."""
    facts = {"vocab_rows": VOCABULARY, "hidden_size": HIDDEN, "eos_token_ids": [1], "pad_token_id": 0, "tied": True}
    layers = {
        f"layers.{index}.{name}": tensor.clone()
        for index in (2, 3)
        for name, tensor in target.blocks[index].state_dict().items()
    }
    norm = target.model.get_decoder().norm.weight
    embeddings = target.embeddings.weight.detach()
    return Interface(embeddings, embeddings, norm.detach(), layers, Manifest("target", facts=facts))


def tiny_frozen() -> FrozenTarget:
    return FrozenTarget(tiny_llama(), TAPS)
