"""Small artefacts made by the library's own code on a tiny target."""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from foredraft.artifacts import Manifest, publish
from foredraft.features.batching import ShardPlan
from foredraft.features.config import ExtractConfig
from foredraft.features.engine import read_shard
from foredraft.features.reading import Reader
from foredraft.features.storing import Store
from foredraft.scratch import Scratch
from foredraft.target.frozen import FrozenTarget
from foredraft.target.interface import LAYERS, WEIGHTS, Interface
from foredraft.tokens.shards import TokenShard, pack
from tests.conftest import HIDDEN, TAPS, VOCABULARY, tiny_llama

EXTRACT = ExtractConfig(
    target_layer_ids=TAPS,
    top_k=4,
    batch_tokens=64,
    shard_tokens=200,
    storage="bfloat16",
    kernels="auto",
    truth_check_documents=2,
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


def one_batch_plan(documents: list[tuple[Tensor, Tensor]], name: str, rows: int = 1000) -> ShardPlan:
    """A plan of documents in the order given, ``rows`` of them in a batch."""
    numbers = list(range(len(documents)))
    batches = tuple(tuple(numbers[start : start + rows]) for start in range(0, len(numbers), rows))
    return ShardPlan(name, "tokens", batches, tuple(len(ids) for ids, _ in documents))


def write_features(
    target: FrozenTarget, shard: TokenShard, path: Path, storage: torch.dtype = torch.bfloat16, rows: int = 1000
) -> Path:
    """Read the documents of ``shard`` in their order and write the feature shard ``path``."""
    documents = [shard.document(index) for index in range(len(shard))]
    plan = one_batch_plan(documents, path.name, rows)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        scratch = Scratch(Path(folder))
        with Store(scratch, "tiny", target.layer_ids, lambda _tokens: None) as store:
            read_shard(Reader(target, storage, EXTRACT.top_k), store, plan, documents)
        return (scratch.path / path.name).rename(path)


def make_features(folder: Path, target: FrozenTarget, documents: int = 12) -> Path:
    """A features artefact with two train shards and one validation shard."""
    files = {"train-00000": (documents, 1), "train-00001": (documents, 2), "validation-00000": (4, 3)}
    with publish(
        folder, Manifest("features", contract={"target_layer_ids": list(TAPS), "response_origin": "keep"})
    ) as building:
        for name, (count, seed) in files.items():
            write_features(target, some_documents(count, seed), building / f"{name}.safetensors")
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


def keep_interface(interface: Interface, folder: Path) -> Path:
    """The same as an artefact that other processes can read."""
    with publish(folder, interface.manifest) as building:
        weights = {"embed_tokens.weight": interface.embed_tokens, "norm.weight": interface.norm}
        save_file(weights, building / WEIGHTS)
        save_file(interface.layers, building / LAYERS)
    return folder


def tiny_frozen() -> FrozenTarget:
    return FrozenTarget(tiny_llama(), TAPS)
