"""Answers on GPUs: padded batches beside continuous batching, and one process beside one for each GPU.

usage: python bench/respond_gpu.py OUT.json [conversations] [new tokens]

Runs where there is a GPU, PyTorch and Transformers (and pydantic, pyarrow, ruamel.yaml, requests). The target is a Llama of
about 1.1 billion random weights whose answers are sampled and end at random, after some 180 tokens on average, as real ones
end at different places: what continuous batching is for. Loading is not counted but for the row of the launcher, whose
processes load for themselves.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from foredraft.chat.render import Renderer
from foredraft.conversations.schema import Conversation, read_conversations, to_record, write_records
from foredraft.provenance import commit, versions
from foredraft.responses.config import RespondConfig, Rule
from foredraft.responses.log import AnswerLog
from foredraft.responses.respond import Job, _answer_all, _groups, even_batches
from foredraft.sources.config import FetchConfig
from foredraft.target.config import TargetConfig
from foredraft.target.frozen import load_target
from foredraft.target.generate import Sampling, batched_answers, continuous_answers
from foredraft.target.interface import write_interface
from tests.tokenizers import make_tokenizer

VOCABULARY, ENDS = 710, 4
FETCH = FetchConfig(stall_seconds=60, retries=0)


def make_target(folder: Path) -> TargetConfig:
    """Save the target's random weights, its tokenizer and a generation config with several ends of turn."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    tokenizer = make_tokenizer("chatml")
    ends = [tokenizer.eos_token_id, *range(10, 10 + ENDS - 1)]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[0])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return TargetConfig(uri=f"file:{folder}", dtype="bfloat16", thinking=False, kept_layers=0)


def main(out: Path, count: int, new_tokens: int) -> None:
    """Measure and write ``out``."""
    lenient = Rule(keep=True, max_ratio=1.0)
    settings: dict[str, Any] = dict.fromkeys(("truncated", "empty", "unclosed_thinking", "looping"), lenient)
    settings |= {"max_new_tokens": new_tokens, "max_prompt_tokens": 2048, "temperature": 1.0, "top_p": 1.0, "seed": 1}
    config = RespondConfig(backend="transformers", batch_size=256, loop_tokens=64, max_skip_ratio=1.0, **settings)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["FOREDRAFT_SCRATCH"] = str(folder / "scratch")
        target = make_target(folder / "weights")
        interface = folder / "interface"
        write_interface(target, FETCH, interface)
        part = folder / "conversations-00000.parquet"
        write_records([to_record(question(n)) for n in range(count)], part)
        job = Job("bench", config, target, FETCH, interface, [part], folder / "one")
        report = {
            "commit": commit(),
            "conversations": count,
            "new_tokens": new_tokens,
            "device": device(),
            "versions": versions(),
        }
        report["backends"] = backends(job)
        report["launcher"] = [launched(replace(job, scratch=folder / f"by-{n}"), n) for n in counts()]
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


def question(number: int) -> Conversation:
    """A conversation of one question; lengths are spread evenly."""
    text = f"Question {number} " + "more words " * (number * 7 % 120)
    message = {"role": "user", "content": text}
    return Conversation(f"{number:024x}", [message], [], "general", "bench", "MIT", "train", str(number))


def backends(job: Job) -> dict[str, dict[str, float]]:
    """Tokens a second of each way to batch, on the same prompts."""
    tokenizer = make_tokenizer("chatml")
    renderer = Renderer(tokenizer, False)
    rows = [row for part in job.parts for row in read_conversations(part)]
    prompts = [d.prompt_ids or [] for group in _groups(rows, job, renderer, tokenizer) for d in group]
    model = load_target(Path(job.target.uri.removeprefix("file:")), job.target, layer_ids=[0]).model
    ends = model.generation_config.eos_token_id
    found: dict[str, dict[str, float]] = {}
    ways = {
        "padded, growing cache": partial(batched_answers, static_cache=False),
        "padded, static cache": partial(batched_answers, static_cache=True),
        "continuous": continuous_answers,
    }
    for name, generate in ways.items():
        generate(model, prompts[:8], 8, ends, Sampling(1.0, 1.0, 0))  # compiles and allocates
        start, tokens = time.perf_counter(), 0
        for batch in even_batches(prompts, job.config.batch_size):
            tokens += sum(map(len, generate(model, batch, job.config.max_new_tokens, ends, Sampling(1.0, 1.0, 1))))
        seconds = time.perf_counter() - start
        found[name] = {"seconds": round(seconds, 1), "tokens": tokens, "tokens_per_s": round(tokens / seconds)}
        print(name, found[name], flush=True)
    return found


def launched(job: Job, processes: int) -> dict[str, float]:
    """The stage's own way through PyTorch's launcher: every process loads the target and answers its share."""
    job.scratch.mkdir()
    start = time.perf_counter()
    _answer_all(job, processes)
    seconds = time.perf_counter() - start
    outcomes = [outcome for part in job.parts for outcome in AnswerLog(job.scratch / part.stem).read()]
    tokens = sum(len(answer.response_ids) for outcome in outcomes for answer in outcome.answers)
    found = {"processes": processes, "seconds": round(seconds, 1), "answers": len(outcomes), "tokens": tokens}
    print(found, flush=True)
    return found


def counts() -> list[int]:
    """Numbers of processes to try."""
    return sorted({1, max(1, torch.cuda.device_count())})


def device() -> str:
    """The GPU's name."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(Path(arguments[0]), *(int(value) for value in (*arguments[1:], *("512", "256")[len(arguments) - 1 :])))
