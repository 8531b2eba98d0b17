"""The ``prepare`` stage: answers -> token ids and loss mask, in shards."""

from collections import Counter
from pathlib import Path

from foredraft.artifacts import Manifest, publish
from foredraft.responses.schema import Response, open_responses
from foredraft.target.artifact import open_interface
from foredraft.tokens.config import PrepareConfig
from foredraft.tokens.shards import SPLITS, pack, write_shard


def prepare(name: str, config: PrepareConfig, responses: Path, interface: Path, out: Path) -> None:
    """Write the token shards of source ``name`` as the artefact ``out``.

    The mask is 1 exactly on the answer's tokens, the end-of-turn token included when the target said it: it is known from
    how the row was made, not searched for.

    Raises:
        ValueError: no document is left; or an id is past the target's embedding.
    """
    source, rows = open_responses(responses, name)
    facts = open_interface(interface).facts
    skipped: Counter[str] = Counter()
    documents: dict[str, list[tuple[list[int], list[int]]]] = {split: [] for split in SPLITS}
    for row in rows:
        document = to_document(row, config.max_length)
        if sum(document[1]) < config.min_supervised_tokens:
            skipped["too_few_supervised"] += 1
            continue
        if max(document[0]) >= facts["vocab_rows"]:
            raise ValueError(
                f"{responses}: row {row.id} has id {max(document[0])}, past {facts['vocab_rows']} embeddings"
            )
        documents[row.split].append(document)

    kept = sum(map(len, documents.values()))
    if kept == 0:
        raise ValueError(f"sources.{name}: no document of {len(rows)} answers; skipped {dict(skipped)}")
    manifest = Manifest(
        "tokens",
        contract=source.contract,
        counts={"rows_in": len(rows), "rows_out": kept, "skipped": dict(sorted(skipped.items()))},
        facts={"shards": {}},
    )
    with publish(out, manifest) as folder:
        for split, rows_of_split in documents.items():
            for number, part in enumerate(_by_tokens(rows_of_split, config.shard_tokens)):
                shard = pack(part)
                file = f"{split}-{number:05d}.safetensors"
                write_shard(shard, folder / file)
                manifest.facts["shards"][file] = {
                    "documents": len(shard),
                    "tokens": len(shard.input_ids),
                    "supervised": int(shard.loss_mask.sum()),
                }


def to_document(row: Response, max_length: int) -> tuple[list[int], list[int]]:
    """Ids and loss mask of one answered prompt, cut at ``max_length``."""
    ids = row.prompt_ids + row.response_ids
    mask = [0] * len(row.prompt_ids) + [1] * len(row.response_ids)
    return ids[:max_length], mask[:max_length]


def _by_tokens(documents: list[tuple[list[int], list[int]]], budget: int) -> list[list[tuple[list[int], list[int]]]]:
    parts: list[list[tuple[list[int], list[int]]]] = []
    room = 0
    for document in documents:
        if room < len(document[0]):
            parts.append([])
            room = budget
        parts[-1].append(document)
        room -= len(document[0])
    return parts
