"""SpecForge's in-process preparation on our corpus; run by .peers/specforge/bin/python, from bench/data.py.

usage: specforge_peer.py CORPUS.jsonl TOKENIZER ROWS WORKERS MAX_LENGTH AGREE_ROWS AGREE.jsonl

Prints one JSON line. The time is that of ``build_eagle3_dataset`` alone, which shuffles, tokenizes, masks and writes
Arrow files in ``HF_DATASETS_CACHE``; imports and the reading of the JSON Lines are not in it.

``AGREE.jsonl`` receives ids and mask of the first ``AGREE_ROWS`` rows, made by a second, untimed call. The template
``qwen`` puts its own system message before a row that has none, and SmolLM2's template another: there each row states
SmolLM2's, which SpecForge takes over.
"""

import json
import resource
import sys
import time
from importlib.metadata import version
from typing import Any

import pyarrow.compute as pc
import torch
from datasets import Dataset, disable_progress_bars, load_dataset
from specforge.data.preprocessing import build_eagle3_dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

PACKAGES = ("specforge", "torch", "transformers", "datasets", "tokenizers")


def main(corpus: str, folder: str, rows: int, workers: int, max_length: int, agree_rows: int, agree: str) -> None:
    """Time the preparation of ``rows`` rows, and write what it makes of the first ``agree_rows``."""
    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dataset = load_dataset("json", data_files=corpus, split=f"train[:{rows}]")
    head = dataset.select(range(min(agree_rows, len(dataset))))
    start, start_cpu = time.perf_counter(), cpu_seconds()
    prepared = build(dataset, tokenizer, max_length, workers)
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - start_cpu
    report = {
        "rows": len(dataset),
        "rows_out": len(prepared),
        "tokens": tokens(prepared),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "max_rss_mib": max(resident(resource.RUSAGE_SELF), resident(resource.RUSAGE_CHILDREN)),
        "versions": {name: version(name) for name in PACKAGES},
    }
    write_agreement(head, tokenizer, max_length, agree)
    print(json.dumps(report))


def build(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, workers: int) -> Dataset:
    """Call SpecForge; no ``cache_dir`` and no ``cache_key`` turn its cache off."""
    return build_eagle3_dataset(dataset, tokenizer, chat_template="qwen", max_length=max_length, num_proc=workers)


def tokens(prepared: Dataset) -> int:
    """Count the ids of rows of shape ``[1, length]`` in Arrow, without making lists of them."""
    column = prepared.data.column("input_ids")
    return sum(pc.sum(pc.list_value_length(pc.list_flatten(chunk))).as_py() or 0 for chunk in column.chunks)


def cpu_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def resident(who: int) -> int:
    """Largest resident set of this process, or of its largest child, in MiB."""
    return resource.getrusage(who).ru_maxrss // 1024


def write_agreement(head: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, path: str) -> None:
    """Write ids and mask of the rows, in SpecForge's own (shuffled) order, a row a line."""
    said = {"role": "system", "content": system_message(tokenizer)}
    stated = head.map(lambda row: {"conversations": [said, *row["conversations"]]}, load_from_cache_file=False)
    with open(path, "w", encoding="utf-8") as out:  # noqa: PTH123
        for row in build(stated, tokenizer, max_length, 1):
            ids, mask = (torch.as_tensor(row[name])[0].tolist() for name in ("input_ids", "loss_mask"))
            out.write(json.dumps({"ids": ids, "mask": mask}) + "\n")


def system_message(tokenizer: Any) -> str:
    """What the tokenizer's template says for the system when a conversation does not."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    return text.partition("<|im_start|>system\n")[2].partition("<|im_end|>")[0]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7]), sys.argv[7])
