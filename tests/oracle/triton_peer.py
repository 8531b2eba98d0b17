"""Every Triton kernel against the plain function that it stands for, in Triton's interpreter; prints the differences.

Run with the Python of ``.peers/triton``. The interpreter cuts where a GPU rounds, so 16-bit types are compared loosely.
"""

import json
import os
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from foredraft.drafter import fused_loss, loss
from foredraft.features import fused_taps, taps
from foredraft.target import fused, fused_delta, pointwise

Pair = tuple[str, Tensor, Tensor]


def block_functions(dtype: torch.dtype) -> Iterator[Pair]:
    """Name, ours and the plain result of each function between the products of a block."""
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, wide, heads, weight = some(2, 5, 24), some(2, 5, 100), some(2, 5, 3, 16), some(16)
    for centred in (False, True):
        arguments = (x, x[0, 0], 1e-6, centred)
        yield "rms_norm", fused.rms_norm(*arguments), pointwise.rms_norm(*arguments)
    gated = (heads, wide[..., 20:68], weight, 1e-6)
    yield "gated_rms_norm", fused.gated_rms_norm(*gated), pointwise.gated_rms_norm(*gated)
    yield "silu_mul", fused.silu_mul(wide), pointwise.silu_mul(wide)
    projected = wide[..., :96].unflatten(-1, (3, 32))
    read = some(2, 5, 48)
    yield "sigmoid_gate", fused.sigmoid_gate(read, projected), pointwise.sigmoid_gate(read, projected)
    for norm in (None, (weight, 1e-6, False), (weight, 1e-6, True)):
        for rows in (1, 2):  # angles of all rows, or of each
            turned = (projected[..., :16], norm, some(rows, 5, 8), some(rows, 5, 8))
            yield "norm_and_rotate", fused.norm_and_rotate(*turned), pointwise.norm_and_rotate(*turned)
    for key_heads, value_heads, length in ((2, 4, 5), (2, 2, 33), (8, 8, 70), (3, 6, 130)):
        size = 16
        channels = (2 * key_heads + value_heads) * size
        delta = (
            some(2, length, channels + value_heads * size + 2 * value_heads),
            some(4, channels),
            torch.rand(value_heads, generator=generator),
            torch.rand(value_heads, generator=generator),
            key_heads,
            key_heads * size,
            value_heads * size,
        )
        parts = zip(fused.delta_inputs(*delta), pointwise.delta_inputs(*delta), strict=True)
        for name, (mine, plain) in zip(("query", "key", "value", "decay", "strength"), parts, strict=True):
            yield f"delta_inputs {name}", mine, plain


def delta_rule() -> Iterator[Pair]:
    """The delta rule's reading against Transformers' own; the interpreter's products are in float32 alone."""
    generator = torch.Generator().manual_seed(2)
    fused_delta.shared_memory = lambda _device: 0  # there is no device to ask
    for length in (5, 64, 130):
        query, key = (F.normalize(torch.randn(2, length, 2, 64, generator=generator), dim=-1) for _ in range(2))
        value, strength = (
            torch.randn(2, length, 4, 64, generator=generator),
            torch.rand(2, length, 4, generator=generator),
        )
        decay = -torch.rand(2, length, 4, generator=generator) * 2
        sums = fused_delta.chunk_sums(decay)
        read = fused_delta.scan(query, key, value, sums, strength, solved_chunks(key, sums, strength))
        heads = (x.repeat_interleave(2, 2) for x in (query, key))
        yield "delta_rule", read, torch_chunk_gated_delta_rule(*heads, value, g=decay, beta=strength)[0]


def solved_chunks(key: Tensor, sums: Tensor, strength: Tensor) -> Tensor:
    """What flash-linear-attention's kernel gives, by its definition: of each chunk the inverse of its triangular matrix."""
    rows, length, heads = strength.shape
    solved = torch.zeros(rows, length, heads, fused_delta.CHUNK)
    for start in range(0, length, fused_delta.CHUNK):
        end = min(length, start + fused_delta.CHUNK)
        keys = key[:, start:end].repeat_interleave(heads // key.shape[2], 2).transpose(1, 2)
        total, write = (x[:, start:end].transpose(1, 2)[..., None] for x in (sums, strength))
        matrix = (keys @ keys.mT * torch.exp2(total - total.mT) * write).tril(-1) + torch.eye(end - start)
        solved[:, start:end, :, : end - start] = torch.linalg.inv(matrix).transpose(1, 2)
    return solved


def tap_functions(dtype: torch.dtype) -> Iterator[Pair]:
    """Name, ours and the plain result of what is done to a tap."""
    states = torch.randn(40, 24, generator=torch.Generator().manual_seed(1)).to(dtype) * 3
    states[7], states[13], states[9, 3], states[11, 2] = 0.0, 2.0, float("nan"), float("inf")
    everything, sane = torch.tensor([0, 1, 2, 7, 9, 11, 13, 39, 20]), torch.tensor([0, 1, 39, 20])
    for name, places, storage in (("bfloat16", everything, torch.bfloat16), ("float8", sane, torch.float8_e4m3fn)):
        found = []
        for module in (fused_taps, taps):
            hidden = torch.zeros(len(places), 2, 24, dtype=storage)
            faults = torch.zeros(len(places), 2, dtype=torch.uint8)
            scale = torch.zeros(len(places), 2) if storage == torch.float8_e4m3fn else None
            part = None if scale is None else scale[:, 1]
            sums = module.take_tap(states, places, hidden[:, 1], part, faults[:, 1])
            scaled = hidden.float() if scale is None else hidden.float() * scale[..., None]
            good = ~faults[:, 1].bool()
            found.append((scaled[good], faults, sums[None]))
        for part_name, mine, plain in zip(("states", "faults", "sums"), *found, strict=True):
            if part_name != "sums" or places is sane:
                yield f"take_tap {name} {part_name}", mine, plain


def loss_functions(dtype: torch.dtype) -> Iterator[Pair]:
    """Name, ours and the plain result of what passes over rows of logits."""
    logits = (torch.randn(6, 5000, generator=torch.Generator().manual_seed(3)) * 4).to(dtype)
    share = torch.linspace(-1, 2, 6)
    (mine, best), (plain, best_plain) = (module.normaliser_and_best(logits) for module in (fused_loss, loss))
    yield "normaliser", mine, plain
    yield "best", best, best_plain
    scaled = [logits.clone() for _ in range(2)]
    for module, copy in zip((fused_loss, loss), scaled, strict=True):
        module.scale_softmax(copy, plain, share)
    yield "scale_softmax", *scaled


def main() -> None:
    """Print, for each type and function, the distance as a share of the plain result's length."""
    report: dict[str, dict[str, float]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        worst = report.setdefault(str(dtype), {})
        for name, mine, plain in [
            *block_functions(dtype),
            *tap_functions(dtype),
            *loss_functions(dtype),
            *(delta_rule() if dtype == torch.float32 else ()),
        ]:
            assert mine.shape == plain.shape, name
            assert mine.dtype == plain.dtype, name
            share = float((mine.double() - plain.double()).norm() / plain.double().norm().clamp(min=1e-9))
            worst[name] = max(worst.get(name, 0.0), share)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
