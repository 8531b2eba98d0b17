"""What reading a large hybrid target's states costs on a GPU: plain Transformers, ours, and the matrix products alone.

usage: python bench/extract_gpu.py OUT.json [part ...]

Runs where there is a GPU, PyTorch, Triton and Transformers (and pydantic, ruamel.yaml, filelock); flash-linear-attention may
lie in the folder $FLA. The target has the shape of Qwen3.6-27B and random weights. Each part runs in a process of its own,
one after the other on the same GPU: ``plain``, which does not see $FLA, and ``ours``. With two GPUs there is ``two``: the
stage's own processes on one of them and on both.
"""

import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import parts

TAPS = (1, 16, 31, 46, 61)
ROWS, LENGTH, TOP_K = 8, 2048, 16
WARM_UP, REPEATS = 2, 5
BATCHES = 16
"""Batches of each run that writes."""


def make_target() -> Any:
    """A text model of Qwen3.6-27B's shape on the GPU, with random weights in bfloat16."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    from transformers.initialization import no_init_weights

    config = Qwen3_5TextConfig(
        vocab_size=248_320,
        hidden_size=5120,
        intermediate_size=17_408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        tie_word_embeddings=False,
        max_position_embeddings=262_144,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"), no_init_weights():
        model = Qwen3_5ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        randomise(name, weight.data)
    return model.eval().requires_grad_(False)


def randomise(name: str, weight: Tensor) -> None:
    """Values such as a trained model might have; what adds to the residual stream is small, or 64 blocks would be chaos."""
    if name.endswith("A_log"):
        weight.uniform_(0.01, 16).log_()
    elif name.endswith(("dt_bias", "linear_attn.norm.weight")):
        weight.fill_(1.0)
    elif "norm" in name:
        weight.zero_()
    else:
        adds = name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight"))
        weight.normal_(0.0, 0.02 / 128**0.5 if adds else 0.02)


def seconds_of(work: Callable[[], Any]) -> float:
    """Median time of ``work`` on the GPU."""
    for _ in range(WARM_UP):
        work()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def random_ids() -> Tensor:
    """The batch that is timed."""
    return torch.randint(1000, 200_000, (ROWS, LENGTH), device="cuda")


@torch.inference_mode()
def plain() -> dict[str, Any]:
    """Transformers as it comes: all hidden states, logits, no kernels of anybody else's."""
    model, ids = make_target(), random_ids()
    seconds = seconds_of(lambda: model(input_ids=ids, output_hidden_states=True, use_cache=False).logits.shape)
    return {"plain_tokens_per_s": round(ids.numel() / seconds)}


@torch.inference_mode()
def ours() -> dict[str, Any]:
    """The forward pass beside the floor, then whole runs that write."""
    from foredraft.features.checks import as_record, truth_check
    from foredraft.target.frozen import FrozenTarget
    from foredraft.target.kernels import accelerate, choose_tools, describe

    target, ids = FrozenTarget(make_target(), TAPS), random_ids()
    found: dict[str, Any] = {"kernels": describe("auto")}

    def forward() -> None:
        target.stream(ids, lambda _layer, _states: None)

    found["stock_tokens_per_s"] = round(ids.numel() / seconds_of(forward))
    start = time.perf_counter()
    accelerate(target, choose_tools())
    forward()
    torch.cuda.synchronize()
    found["first_pass_seconds"] = round(time.perf_counter() - start, 1)
    found["truth"] = as_record(truth_check(target, [random_ids()[0, :length].cpu() for length in (700, 300, 1000)]))
    inputs = product_inputs(target)
    pairs = [(seconds_of(lambda: bare_products(target, inputs)), seconds_of(forward)) for _ in range(3)]
    bare, seconds = (statistics.median(values) for values in zip(*pairs, strict=True))
    found |= {
        "tokens_per_s": round(ids.numel() / seconds),
        "floor_tokens_per_s": round(ids.numel() / bare),
        "floor_share": round(bare / seconds, 3),
    }
    found["seconds_first_and_second"] = new_shapes(target)
    print(found, flush=True)
    found["kernel_milliseconds"] = by_kernel(forward)
    print(found["kernel_milliseconds"], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found |= writing(target, Path(folder), found["tokens_per_s"])
    found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    return found


def bare_products(target: Any, inputs: dict[int, Tensor]) -> None:
    """All linear layers of the decoder, each as a product of its own, and nothing else: the floor."""
    for layer in target.blocks.modules():
        if isinstance(layer, nn.Linear):
            F.linear(inputs[layer.in_features], layer.weight)


def product_inputs(target: Any) -> dict[int, Tensor]:
    """A random input for each width."""
    sizes = {layer.in_features for layer in target.blocks.modules() if isinstance(layer, nn.Linear)}
    return {size: torch.randn(ROWS * LENGTH, size, device="cuda", dtype=torch.bfloat16) for size in sizes}


def by_kernel(work: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of the kernels that take longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    rows = [(event.self_device_time_total / 1e3, event.key[:70]) for event in recorded.key_averages()]
    return {name: round(milliseconds, 2) for milliseconds, name in sorted(rows, reverse=True)[:20]}


def writing(target: Any, folder: Path, forward_rate: float) -> dict[str, Any]:
    """Whole runs: batches, top-k, checks, files."""
    fixed = [LENGTH] * (ROWS * BATCHES)
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(4000, generator=generator) * 0.8 + 6.99).exp().clamp(16, 8192).int().tolist()
    found: dict[str, Any] = {}
    runs = {
        "states": (fixed, torch.bfloat16, 0.0),
        "bfloat16": (fixed, torch.bfloat16, 0.5),
        "float8": (fixed, torch.float8_e4m3fn, 0.5),
        "mixed": (drawn, torch.bfloat16, 0.5),
        "short": ([64] * (256 * BATCHES), torch.bfloat16, 0.5),
    }
    for name, (lengths, storage, supervised) in runs.items():
        found[name] = run(target, folder / name, lengths, storage, supervised)
        print(name, found[name], flush=True)
    return {
        "runs": found,
        "with_writing_share": round(found["states"]["tokens_per_s"] / forward_rate, 3),
        "with_top_k_share": round(found["bfloat16"]["tokens_per_s"] / forward_rate, 3),
        "mixed_length_share": round(found["mixed"]["tokens_per_s"] / found["bfloat16"]["tokens_per_s"], 3),
        "padding": found["mixed"]["padding"],
        "mean_length": round(sum(drawn) / len(drawn)),
        "bytes_per_token": found["float8"]["bytes_per_token"],
        "bytes_per_token_bfloat16": found["bfloat16"]["bytes_per_token"],
        "short_samples_per_s": round(found["short"]["tokens_per_s"] / 64, 1),
    }


def run(target: Any, folder: Path, lengths: list[int], storage: torch.dtype, supervised: float) -> dict[str, Any]:
    """Read documents of these lengths to disk; the rate is that of batches that are written, from the third to the last.

    Args:
        supervised: share of each document, at its end; with 0 its last token alone, so that the head has nothing to do.
    """
    from foredraft.features.batching import plan_shards
    from foredraft.features.engine import read_shard
    from foredraft.features.reading import Reader
    from foredraft.features.storing import Store
    from foredraft.scratch import Scratch

    tokens = write_tokens(folder / "tokens", lengths, supervised)
    plans = plan_shards(tokens, ["train-00000.safetensors"], ROWS * LENGTH, 20_000)
    # Batches of all lengths are spread over the shards: the first ones are a fair sample.
    read = plans[: BATCHES + 2]
    (folder / "features").mkdir()
    scratch, times, lock = Scratch(folder / "features"), [], threading.Lock()

    def written(count: int) -> None:
        with lock:
            times.append((time.perf_counter(), count))

    reader, stream = Reader(target, storage, TOP_K), torch.cuda.Stream()
    start = time.perf_counter()
    with Store(scratch, "bench", TAPS, written) as store:
        for plan in read:
            read_shard(reader, store, plan, plan.read(tokens), stream)
    seconds = time.perf_counter() - start
    stored = sum(plan.tokens for plan in read)
    size = sum(path.stat().st_size for path in (folder / "features").glob("*.safetensors"))
    shutil.rmtree(folder)
    times.sort()
    steady = sum(count for _, count in times[3:]) / (times[-1][0] - times[2][0])
    return {
        "tokens": stored,
        "tokens_per_s": round(steady),
        "tokens_per_s_with_start_and_end": round(stored / seconds),
        "padding": round(1 - sum(plan.tokens for plan in plans) / sum(plan.padded_tokens for plan in plans), 4),
        "bytes_per_token": round(size / stored, 1),
        "shards": len(read),
    }


def write_tokens(folder: Path, lengths: list[int], supervised: float) -> Path:
    """A token shard of random ids."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.randint(1000, 200_000, (int(offsets[-1]),), generator=generator, dtype=torch.int32)
    mask = torch.zeros(len(ids), dtype=torch.uint8)
    for end, length in zip(offsets[1:].tolist(), lengths, strict=True):
        mask[end - max(1, round(length * supervised)) : end] = 1
    folder.mkdir(parents=True)
    save_file({"input_ids": ids, "loss_mask": mask, "offsets": offsets}, folder / "train-00000.safetensors")
    return folder


def new_shapes(target: Any) -> dict[str, float]:
    """Seconds of a first and of a second pass over batches of lengths not seen before."""
    found = {}
    for rows, length in ((5, 3000), (2, 6500), (40, 400)):
        ids = torch.randint(1000, 200_000, (rows, length), device="cuda")
        times = []
        for _ in range(2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            target.stream(ids, lambda _layer, _states: None)
            torch.cuda.synchronize()
            times.append(round(time.perf_counter() - start, 3))
        found[f"{rows}x{length}"] = times
    return found


def two() -> dict[str, Any]:
    """The stage's processes, started by its launcher, on one GPU and then on two; the same shards give the same bytes."""
    from foredraft.features.batching import plan_shards
    from foredraft.features.config import ExtractConfig
    from foredraft.features.engine import Job
    from foredraft.launch import launch
    from foredraft.params import load_section
    from foredraft.sources.config import FetchConfig
    from foredraft.target.config import TargetConfig

    params = ROOT / "params.yaml"
    config = ExtractConfig(
        target_layer_ids=TAPS,
        top_k=TOP_K,
        batch_tokens=ROWS * LENGTH,
        shard_tokens=20_000,
        storage="bfloat16",
        kernels="auto",
        truth_check_documents=2,
    )
    found: dict[int, tuple[float, list[str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tokens = write_tokens(Path(folder) / "tokens", [LENGTH] * (ROWS * BATCHES * 2), 0.5)
        plans = plan_shards(tokens, ["train-00000.safetensors"], config.batch_tokens, config.shard_tokens)
        for processes in (1, 2):
            scratch = Path(folder) / f"features-{processes}"
            scratch.mkdir()
            some = tuple(plans[: BATCHES * processes])
            fetch, target = load_section(params, "fetch", FetchConfig), load_section(params, "target", TargetConfig)
            job = Job("bench", config, target, fetch, tokens, scratch, {}, some, some, torch.get_num_threads())
            launch(share_of_random_target, job, "bench", scratch, processes)
            found[processes] = rate_of_shards(scratch, some, processes), digests(scratch, plans[:BATCHES])
    (one, alone), (both, together) = found[1], found[2]
    return {
        "one_gpu_tokens_per_s": round(one),
        "two_gpu_tokens_per_s": round(both),
        "two_gpu_ratio": round(both / one, 3),
        "two_gpu_same_bytes": alone == together,
    }


def share_of_random_target(job: Any) -> None:
    """What a launched process of ``extract`` does, with a target that is made instead of loaded."""
    from foredraft.features import engine
    from foredraft.launch import place
    from foredraft.target.frozen import FrozenTarget
    from foredraft.target.kernels import accelerate, choose_tools

    rank, _, device = place()
    torch.cuda.set_device(device)

    def ready_target(*_arguments: Any, **_options: Any) -> FrozenTarget:
        target = FrozenTarget(make_target(), TAPS)
        accelerate(target, choose_tools())
        with torch.inference_mode():
            target.stream(random_ids(), lambda _layer, _states: None)
        return target

    engine.ready_target = ready_target
    engine.read_share(job, rank, device)


def rate_of_shards(folder: Path, plans: tuple[Any, ...], processes: int) -> float:
    """Tokens a second while all processes were at work: the slope of tokens finished over the time of each shard's file."""
    finished = sorted((folder / plan.name).stat().st_mtime for plan in plans)[2 * processes : -processes]
    tokens = plans[0].tokens
    mean = sum(finished) / len(finished)
    spread = sum((moment - mean) ** 2 for moment in finished)
    return tokens * sum((moment - mean) * number for number, moment in enumerate(finished)) / spread


def digests(folder: Path, plans: list[Any]) -> list[str]:
    """SHA-256 of each shard's file, as they were taken while it was written."""
    seals = [json.loads((folder / f"{plan.name}.seal").read_text(encoding="utf-8")) for plan in plans]
    return [seal["sha256"] for seal in seals]


PARTS: dict[str, parts.Part] = {"plain": plain, "ours": ours, "two": two}

if __name__ == "__main__":
    parts.run(
        __file__,
        PARTS,
        ["ours", "plain"] + ["two"] * (torch.cuda.device_count() > 1),
        {"shape": "Qwen3.6-27B, random weights", "batch": [ROWS, LENGTH], "two_gpu_ratio": None},
        {"ours": "FLA", "two": "FLA"},
    )
