"""What a training step of a large drafter costs on a GPU: ours, speculators' and the matrix products alone.

usage: python bench/train_gpu.py OUT.json [part ...]     (the parts ``two`` and ``fsdp`` want two GPUs)

Runs where there is a GPU, PyTorch, Triton and Transformers (and pydantic, filelock, ruamel.yaml, which may lie in the
folder $PEER, beside speculators 0.9.0). The drafter has the shape of the one published for Qwen3.6-27B and random weights;
a step reads one document of 3,072 tokens with 512 blocks of 16 and ends with AdamW. Each part runs in a process of its own.
"""

import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch
from torch import Tensor

from bench import parts
from bench.stand_ins import open_speculators

TOKENS, ANCHORS, BLOCK = 3072, 512, 16
LAYERS, HEADS, KV_HEADS, HEAD, HIDDEN, FFN, VOCABULARY, TAPS = 5, 32, 8, 128, 5120, 17_408, 248_320, 5
TOP_K = 16
WARM_UP, REPEATS = 4, 5
ROWS = 3
"""On the GPU, as many as in a run: one in use, one ready, one that has been made. The peer's run has one."""
PROFILE = ROOT / "profiles/qwen3.6-27b.yaml"


def seconds_of(work: Callable[[], Any]) -> float:
    """Median time of a step of three in a row: as in a run, the host may prepare one while the device does another."""
    for _ in range(WARM_UP):
        work()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 3)
    return statistics.median(times)


def make_learner(
    weights: str, ranks: Any, parallel: str = "ddp", float8: str = "none", drafter: dict[str, Any] | None = None
) -> Any:
    """A drafter of the published shape, at random, with its optimiser and the target's head.

    Args:
        weights: their type, and that of the optimiser's state.
        drafter: changes of its config, for a smaller one.
    """
    from foredraft.drafter.config import DrafterShape
    from foredraft.drafter.model import Drafter, initialise_random
    from foredraft.params import parse_section, read_params
    from foredraft.training.config import TrainConfig
    from foredraft.training.learner import Learner
    from foredraft.training.objective import Head

    section = read_params(PROFILE)["train"]
    layers = {"sliding_window": None, "full_attention_layers": None, "mask_token_id": VOCABULARY - 1} | (drafter or {})
    changes = {
        "drafter": section["drafter"] | layers,
        "loss": section["loss"] | {"weights": "decay", "ce": 1.0, "kl": 0.0, "tv": 0.0},
        "optimizer": "adamw",
        "weight_decay": 0.01,
        "tokens_per_row": TOKENS,
        "anchors_per_row": ANCHORS,
        "tokens_per_step": TOKENS,
        "weights_dtype": weights,
        "parallel": parallel,
        "float8": float8,
        "average": 0.0,
    }
    config = parse_section(PROFILE, "train", section | changes, TrainConfig)
    shape = DrafterShape(
        choice=config.drafter,
        hidden_size=HIDDEN,
        vocab_rows=VOCABULARY,
        target_layer_ids=(1, 16, 31, 46, 61),
        num_target_layers=64,
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        max_position_embeddings=262_144,
    )
    torch.manual_seed(0)
    with ranks.device:
        drafter = Drafter(shape)
        initialise_random(drafter, torch.Generator(ranks.device).manual_seed(1))
        head = torch.randn(VOCABULARY, HIDDEN, dtype=torch.bfloat16) * 0.02
        mask = torch.randn(HIDDEN, dtype=torch.bfloat16)
        return Learner(config, drafter, Head(head, torch.arange(VOCABULARY)), mask, ranks)


def make_row(seed: int) -> Any:
    """A document at random."""
    from foredraft.drafter.blocks import anchor_candidates, build_blocks, draw_anchors
    from foredraft.training.data import Row

    generator = torch.Generator().manual_seed(seed)
    supervised = torch.ones(TOKENS, dtype=torch.bool)
    anchors = draw_anchors(anchor_candidates(supervised)[: -BLOCK + 2], ANCHORS, generator)
    blocks = build_blocks([anchors], [supervised], BLOCK, ANCHORS)
    slots = blocks.counted.flatten().nonzero()[:, 0]
    ids = torch.randint(VOCABULARY, (len(slots), TOP_K), generator=generator)
    row = Row(
        names=["random"],
        bounds=[0, TOKENS],
        stored=torch.randn(TOKENS, TAPS, HIDDEN, generator=generator).bfloat16(),
        positions=torch.arange(TOKENS),
        embedded=torch.randn(ANCHORS, HIDDEN, generator=generator).bfloat16(),
        blocks=blocks,
        count=len(slots),
        slots=slots,
        data_ids=ids[:, 0],
        topk_ids=ids,
        topk_logprobs=torch.randn(len(slots), TOP_K, generator=generator).log_softmax(-1) - 0.5,
        worth=torch.ones(len(slots)),
    )
    return row.to(torch.device("cuda"))


def truth() -> dict[str, Any]:
    """Loss and gradients of a small drafter in float32: on the GPU, and by the dense reference on the CPU."""
    from foredraft.drafter.blocks import anchor_candidates, build_blocks, draw_anchors
    from foredraft.training.data import Row
    from foredraft.training.ranks import Ranks

    global HIDDEN, VOCABULARY
    HIDDEN, VOCABULARY = 256, 5000
    generator = torch.Generator().manual_seed(3)
    lengths, anchors = [301, 57, 642], [20, 3, 14]
    masks = [torch.rand(length, generator=generator) < 0.97 for length in lengths]
    drawn = [draw_anchors(anchor_candidates(m), n, generator) for m, n in zip(masks, anchors, strict=True)]
    blocks = build_blocks(drawn, masks, BLOCK, sum(anchors) + 2)
    slots = blocks.counted.flatten().nonzero()[:, 0]
    ids = torch.randint(VOCABULARY, (len(slots), TOP_K), generator=generator)
    row = Row(
        names=["random"] * 3,
        bounds=[0, 301, 358, 1000],
        stored=torch.randn(1000, TAPS, HIDDEN, generator=generator),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        embedded=torch.randn(sum(anchors) + 2, HIDDEN, generator=generator),
        blocks=blocks,
        count=len(slots),
        slots=slots,
        data_ids=ids[:, 0],
        topk_ids=ids,
        topk_logprobs=torch.randn(len(slots), 40, generator=generator).log_softmax(-1)[:, :TOP_K],
        worth=torch.ones(len(slots)),
    )
    shape = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "ffn_size": 512}
    shape |= {"sliding_window": 100, "full_attention_layers": [1]}
    found = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        learner = make_learner("float32", Ranks(torch.device("cpu")), drafter=shape)
        config = learner.config
        config = config.model_copy(
            update={"compute_dtype": "float32", "loss": config.loss.model_copy(update={"kl": 0.5})}
        )
        learner = type(learner)(config, learner.drafter, learner.head, learner.mask, Ranks(device))
        outcome = learner.run(row.to(device), learner.head)
        outcome.loss.backward()
        gradients = torch.cat([p.grad.flatten().double().cpu() for p in learner.drafter.parameters()])
        found.append((float(outcome.loss), gradients))
    (loss, gradients), (flex_loss, flex_gradients) = found
    return {
        "truth": {
            "loss": abs(flex_loss - loss) / loss,
            "gradients": float((flex_gradients - gradients).norm() / gradients.norm()),
        }
    }


def ours(weights: str, float8: str = "none") -> dict[str, Any]:
    """Our step, with weights and optimiser in this type, and some products in float8."""
    from foredraft.training.ranks import Ranks

    rows = [make_row(seed) for seed in range(ROWS)]
    start = time.perf_counter()
    learner = make_learner(weights, Ranks(torch.device("cuda")), float8=float8)
    losses = [learner.learn([rows[0]], 1e-4).loss]
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    print(weights, "first step", first, torch._dynamo.utils.compile_times(), flush=True)
    steps = iter(range(10**6))
    seconds = seconds_of(lambda: losses.append(learner.learn([rows[next(steps) % ROWS]], 1e-4).loss))
    found = {
        "milliseconds": round(seconds * 1e3, 1),
        "anchors_per_s": round(ANCHORS / seconds),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "resident_gb": round(torch.cuda.memory_allocated() / 1e9, 1),
        "first_step_s": round(first, 1),
        "losses": [round(losses[0], 3), round(losses[-1], 3)],
    }
    found["kernel_milliseconds"] = by_kernel(lambda: learner.learn([rows[0]], 1e-4))
    return found


def disk() -> dict[str, Any]:
    """Steps whose rows come from feature shards, of bfloat16 and of float8, beside steps on rows that are there.

    The shards are pushed out of the system's cache before each pass.
    """
    from functools import partial

    from foredraft.training.data import FeatureData, RowSizes, ahead
    from foredraft.training.ranks import Ranks

    device, documents, passes = torch.device("cuda"), 16, 3
    embeddings = torch.randn(VOCABULARY, HIDDEN).bfloat16()
    sizes = RowSizes(TOKENS, ANCHORS, BLOCK, embeddings)
    learner = make_learner("bfloat16", Ranks(device), float8="all")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for storage in ("bfloat16", "float8_e4m3fn"):
            folder = Path(name) / storage
            folder.mkdir()
            for number in range(documents):
                write_shard(folder / f"train-{number:05d}.safetensors", storage, number)
            data = FeatureData({"random": folder}, "train")
            resident = [data.row([number], sizes, number).to(device) for number in range(ROWS)]
            for _ in range(WARM_UP):
                learner.learn([resident[0]], 1e-4)
            bare, whole, waited = [], [], 0.0
            for _ in range(passes):
                bare.append(seconds_per_step(learner, (resident[n % ROWS] for n in range(documents)))[0])
                for path in folder.iterdir():
                    forget(path)
                rows = ahead((partial(data.row, [n], sizes, n) for n in range(documents)), device)
                seconds, waiting = seconds_per_step(learner, rows)
                whole.append(seconds)
                waited += waiting
            key = "from_disk" if storage == "bfloat16" else "float8_from_disk"
            found[f"{key}_share"] = round(statistics.median(bare) / statistics.median(whole), 3)
            found[f"{key}_waited_share"] = round(waited / (sum(whole) * (documents - 3)), 4)
            found[f"{key}_megabytes_per_s"] = round(
                sum(p.stat().st_size for p in folder.iterdir()) / documents / statistics.median(whole) / 1e6
            )
    return found


def seconds_per_step(learner: Any, rows: Iterator[Any]) -> tuple[float, float]:
    """Time of a step, and what was waited for rows in all; the first three, while which nothing lies ready, not counted."""
    waited, steps, start = 0.0, 0, 0.0
    for number in itertools.count():
        if number == 3:
            torch.cuda.synchronize()
            start, waited = time.perf_counter(), 0.0
        before = time.perf_counter()
        row = next(rows, None)
        waited += time.perf_counter() - before
        if row is None:
            break
        learner.learn([row], 1e-4)
        steps = number - 2
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps, waited


def write_shard(path: Path, storage: str, seed: int) -> None:
    """A feature shard of one document at random."""
    from safetensors.torch import save_file

    from foredraft.features.layout import quantise

    generator = torch.Generator("cuda").manual_seed(seed)
    states = torch.randn(TOKENS, TAPS, HIDDEN, device="cuda", generator=generator).bfloat16()
    ids = torch.randint(VOCABULARY - 1, (TOKENS, TOP_K), device="cuda", generator=generator).int()
    tensors = {
        "input_ids": ids[:, 0],
        "loss_mask": torch.ones(TOKENS, dtype=torch.uint8),
        "offsets": torch.tensor([0, TOKENS]),
        "topk_ids": ids,
        "topk_logprobs": torch.randn(TOKENS, TOP_K, device="cuda", generator=generator).log_softmax(-1) - 0.5,
    }
    if storage == "bfloat16":
        tensors["target_hidden"] = states
    else:
        tensors["target_hidden"], tensors["scale"] = quantise(states)
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, path)


def forget(path: Path) -> None:
    """Push a file out of the system's cache."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def two() -> dict[str, Any]:
    """A row for each of two GPUs beside one on one, by the launcher of the stage."""
    one, both = (launched(processes, "bfloat16", "ddp", "all") for processes in (1, 2))
    return {
        "one_of_two_gpus_milliseconds": one["milliseconds"],
        "two_gpu_milliseconds": both["milliseconds"],
        "two_gpu_ratio": round(2 * one["milliseconds"] / both["milliseconds"], 3),
    }


def fsdp() -> dict[str, Any]:
    """Two GPUs that share weights and optimiser, both in float32."""
    return {"fsdp_float32": launched(2, "float32", "fsdp", "none")}


def launched(processes: int, *how: str) -> dict[str, Any]:
    """A step in so many processes, of a :func:`make_learner` of ``how``."""
    from foredraft.launch import launch

    with tempfile.TemporaryDirectory() as name:
        launch(share_of_step, (Path(name), how), "bench", Path(name), processes)
        found: dict[str, Any] = json.loads((Path(name) / "found.json").read_text())
    print(processes, *how, found, flush=True)
    return found


def share_of_step(job: tuple[Path, tuple[str, str, str]]) -> None:
    """What one of the processes does."""
    from foredraft.launch import place
    from foredraft.training.ranks import Ranks

    folder, (weights, parallel, float8) = job
    rank, world, cuda = place()
    device = torch.device(cuda or "cpu")
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", device_id=device)
    rows = [make_row(10 * rank + seed) for seed in range(ROWS)]
    learner = make_learner(weights, Ranks(device, rank, world), parallel, float8)
    steps = iter(range(10**6))
    seconds = seconds_of(lambda: learner.learn([rows[next(steps) % ROWS]], 1e-4))
    if rank == 0:
        found = {"milliseconds": round(seconds * 1e3, 1), "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1)}
        (folder / "found.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def by_kernel(work: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of the kernels that take longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    rows = [(event.self_device_time_total / 1e3, event.count, event.key[:90]) for event in recorded.key_averages()]
    return {f"{name} x{count}": round(milliseconds, 2) for milliseconds, count, name in sorted(rows, reverse=True)[:40]}


def floor() -> dict[str, Any]:
    """All matrix products of a step and nothing else: forward, by input, by weight; of the head the first two.

    Once in bfloat16, and once with those over slots in float8, of operands that lie there rounded.
    """
    slots, scored, part = ANCHORS * BLOCK, ANCHORS * (BLOCK - 1), 1280
    wide, narrow = HEADS * HEAD, KV_HEADS * HEAD
    over_slots = [
        (slots, HIDDEN, wide + 2 * narrow),
        (slots, wide, HIDDEN),
        (slots, HIDDEN, 2 * FFN),
        (slots, FFN, HIDDEN),
    ]
    over_context = [(TOKENS, HIDDEN, 2 * narrow)] * LAYERS
    features = (TOKENS, TAPS * HIDDEN, HIDDEN)

    @cache
    def operand(rows: int, columns: int, float8: bool) -> Tensor:
        made = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        return made.to(torch.float8_e4m3fn) if float8 else made

    def product(rows: int, inner: int, columns: int, float8: bool) -> None:
        left, right = operand(rows, inner, float8), operand(columns, inner, float8).T
        if float8:
            torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)
        else:
            torch.mm(left, right)

    def work(float8: bool) -> None:
        for rows, inputs, outputs in over_slots * LAYERS:
            product(rows, inputs, outputs, float8)
            product(rows, outputs, inputs, float8)
            product(outputs, rows, inputs, float8)
        for rows, inputs, outputs in over_context:
            product(rows, inputs, outputs, False)
            product(rows, outputs, inputs, False)
            product(outputs, rows, inputs, False)
        rows, inputs, outputs = features
        product(rows, inputs, outputs, False)
        product(outputs, rows, inputs, False)
        for _ in range(scored // part):
            product(part, HIDDEN, VOCABULARY, float8)
            product(part, VOCABULARY, HIDDEN, float8)

    one = torch.ones((), device="cuda")
    seconds = {float8: seconds_of(lambda kind=float8: work(kind)) for float8 in (False, True)}
    sizes = [math.prod(size) for size in over_slots * LAYERS + over_context]
    operations = 2 * (3 * sum(sizes) + 2 * math.prod(features) + 2 * scored * HIDDEN * VOCABULARY)
    return {
        "floor_milliseconds": round(seconds[False] * 1e3, 1),
        "float8_floor_milliseconds": round(seconds[True] * 1e3, 1),
        "floor_tflop": round(operations / 1e12, 1),
        "floor_tflops": round(operations / seconds[False] / 1e12),
    }


def peer() -> dict[str, Any]:
    """speculators' DFlash step: fused cross-entropy, FlexAttention, compiled, weights in bfloat16, fused AdamW."""
    open_speculators("hs_connectors")
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    layers = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        max_position_embeddings=262_144,
        tie_word_embeddings=False,
    )
    layers._attn_implementation = "simple_flex_attention"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=VOCABULARY,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[2, 17, 32, 47, 62],
        mask_token_id=VOCABULARY - 1,
    )
    start = time.perf_counter()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = DFlashDraftModel(config)
        for name, weight in model.named_parameters():
            weight.data.fill_(1.0) if "norm" in name else weight.data.normal_(0.0, 0.02)
    torch.set_default_dtype(torch.float32)
    model = model.to(torch.bfloat16).train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    loss_config = resolve_loss_config("ce", "fused")
    batch = {
        "hidden_states": torch.randn(1, TOKENS, TAPS * HIDDEN, device="cuda", dtype=torch.bfloat16),
        "input_ids": torch.randint(VOCABULARY, (1, TOKENS), device="cuda"),
        "loss_mask": torch.ones(1, TOKENS, device="cuda", dtype=torch.long),
        "verifier_last_hidden_states": torch.randn(1, TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16),
        "document_ids": torch.zeros(1, TOKENS, device="cuda", dtype=torch.long),
        "position_ids": torch.arange(TOKENS, device="cuda")[None],
    }

    def step() -> None:
        _, loss, _ = model(**batch, loss_config=loss_config, gamma=7.0, max_anchors=ANCHORS)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    seconds = seconds_of(step)
    return {
        "peer_milliseconds": round(seconds * 1e3, 1),
        "peer_anchors_per_s": round(ANCHORS / seconds),
        "peer_peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "peer_first_step_s": round(first, 1),
    }


PARTS: dict[str, parts.Part] = {
    "float8": lambda: {"float8": ours("bfloat16", "all")},
    "bfloat16": lambda: {"bfloat16": ours("bfloat16")},
    "peer": peer,
    "floor": floor,
    "disk": disk,
    "truth": truth,
    "two": two,
    "float8_head": lambda: {"float8_head": ours("bfloat16", "head")},
    "float32": lambda: {"float32": ours("float32")},
    "fsdp": fsdp,
}


def compared(found: dict[str, Any]) -> dict[str, Any]:
    """Ours, all in float8 that can be, beside the peer and the products alone, as far as they were measured."""
    report: dict[str, Any] = {}
    if "float8" in found:
        own = found["float8"]
        report |= {key: own[key] for key in ("milliseconds", "anchors_per_s", "peak_gb", "first_step_s")}
        if "peer_anchors_per_s" in found:
            report["ratio"] = round(own["anchors_per_s"] / found["peer_anchors_per_s"], 3)
            report["peak_ratio"] = round(own["peak_gb"] / found["peer_peak_gb"], 3)
        if "floor_milliseconds" in found:
            report["floor_share"] = round(found["float8_floor_milliseconds"] / own["milliseconds"], 3)
    if "bfloat16" in found:
        own = found["bfloat16"]
        if "peer_anchors_per_s" in found:
            report["bfloat16_ratio"] = round(own["anchors_per_s"] / found["peer_anchors_per_s"], 3)
        if "floor_milliseconds" in found:
            report["bfloat16_floor_share"] = round(found["floor_milliseconds"] / own["milliseconds"], 3)
    return report


if __name__ == "__main__":
    about = {"shape": "Qwen3.6-27B's drafter, random weights", "two_gpu_ratio": None}
    chosen = ["float8", "bfloat16", "peer", "floor", "disk", "truth"]
    parts.run(__file__, PARTS, chosen, about, dict.fromkeys(PARTS, "PEER"), compared)
