# mypy: disallow-untyped-defs = false
"""The chunked gated delta rule, forward only, with nothing between the chunks written to memory.

A head's state ``S (E, E)`` obeys, token by token, ``S <- a S + b k (v - a k S)`` with decay ``a`` and strength ``b``.
Within a chunk of 64 tokens this is ``u = A (b (v - d k S))``: ``d`` is the decay since the chunk's begin and ``A`` the
inverse of a unit triangular matrix of the chunk's own keys, which flash-linear-attention's kernel solves for all chunks at
once. What its other kernels do one after the other (two products with ``A``, the states of all chunks, the outputs) is one
pass here: a program follows some values of a head through its chunks and keeps the state in registers.

Both kernels run in one fixed configuration each, the fastest of those tried on an H200. One that was tuned anew in every
process could differ between them, and with it the bytes that they write.

Source: S. Yang, J. Kautz, A. Hatamizadeh, Gated Delta Networks, 2024, section 3.3.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64
TO_BASE_TWO = 1.4426950408889634
PART = 64
"""Values of a head that one program follows."""
TWO_STAGES = 116 << 10
"""Bytes of a multiprocessor's memory that loading the next chunk while one is worked on takes."""


def delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Read rows from an empty state.

    Args:
        query, key: ``(B, T, key heads, E)``, of length one each; ``E`` is 64 or 128.
        value: ``(B, T, H, E)``.
        g: ``(B, T, H)``, logarithms of the decay of each token.
        beta: ``(B, T, H)``, the strength of its write.

    Returns:
        ``(B, T, H, E)``.
    """
    sums = chunk_sums(g)
    return scan(query, key, value, sums, beta, solved_chunks(key, sums, beta))


def chunk_sums(g: Tensor) -> Tensor:
    """Sums of ``g (B, T, H)`` from each chunk's begin, to base two, in float32."""
    rows, length, heads = g.shape
    out = torch.empty_like(g, dtype=torch.float32)
    grid = (triton.cdiv(length, CHUNK), rows)
    _chunk_sums[grid](g, out, length, heads, triton.next_power_of_2(heads), TO_BASE_TWO, CHUNK, num_warps=4)
    return out


def solved_chunks(key: Tensor, sums: Tensor, beta: Tensor) -> Tensor:
    """``A`` of each chunk, ``(B, T, H, 64)``: row t holds what token t takes of the chunk's earlier ones."""
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_kkt_solve_kernel as solve

    solve.fn.configs = [triton.Config({"BK": 64}, num_warps=1)]
    rows, length, key_heads, size = key.shape
    heads = beta.shape[-1]
    solved = key.new_zeros(rows, length, heads, CHUNK)
    solve[(triton.cdiv(length, CHUNK), rows * heads)](
        k=key,
        g=sums,
        beta=beta,
        A=solved,
        cu_seqlens=None,
        chunk_indices=None,
        T=length,
        H=key_heads,
        HV=heads,
        K=size,
        BT=CHUNK,
        BC=16,
    )
    return solved


def scan(query: Tensor, key: Tensor, value: Tensor, sums: Tensor, beta: Tensor, solved: Tensor) -> Tensor:
    """Follow every head through its chunks; see :func:`delta_rule`."""
    rows, length, heads, size = value.shape
    out = torch.empty_like(value)
    _scan[(size // PART, rows * heads)](
        query,
        key,
        value,
        sums,
        beta,
        solved,
        out,
        size**-0.5,
        length,
        key.shape[2],
        heads,
        size,
        CHUNK,
        PART,
        num_warps=4,
        num_stages=2 if shared_memory(value.device.index) >= TWO_STAGES else 1,
    )
    return out


@lru_cache
def shared_memory(device: int) -> int:
    """Bytes that a program can hold in a multiprocessor's own memory."""
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]


@triton.jit
def _chunk_sums(g, out, length, heads: tl.constexpr, block: tl.constexpr, unit: tl.constexpr, chunk: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * chunk + tl.arange(0, chunk)[:, None]
    head = tl.arange(0, block)[None, :]
    inside = (token < length) & (head < heads)
    place = (row * length + token) * heads + head
    values = tl.load(g + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, tl.cumsum(values, 0) * unit, mask=inside)


@triton.jit(do_not_specialize=["length"])
def _scan(
    query,
    key,
    value,
    sums,
    beta,
    solved,
    out,
    scale,
    length,
    key_heads: tl.constexpr,
    heads: tl.constexpr,
    size: tl.constexpr,
    chunk: tl.constexpr,
    part: tl.constexpr,
):
    row, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    key_head = head // (heads // key_heads)
    at = tl.arange(0, size)
    mine = tl.program_id(0) * part + tl.arange(0, part)
    within = tl.arange(0, chunk)
    earlier = within[:, None] >= within[None, :]
    dtype = query.dtype.element_ty
    state = tl.zeros((size, part), dtype=tl.float32)
    for start in range(0, length, chunk):
        token = start + within
        inside = token < length
        flat = row * length + token
        keys_at = (flat * key_heads + key_head)[:, None] * size + at[None, :]
        values_at = (flat * heads + head)[:, None] * size + mine[None, :]
        q = tl.load(query + keys_at, mask=inside[:, None], other=0.0)
        k = tl.load(key + keys_at, mask=inside[:, None], other=0.0)
        v = tl.load(value + values_at, mask=inside[:, None], other=0.0)
        a = tl.load(solved + (flat * heads + head)[:, None] * chunk + within[None, :], mask=inside[:, None], other=0.0)
        total = tl.load(sums + flat * heads + head, mask=inside, other=0.0)
        strength = tl.load(beta + flat * heads + head, mask=inside, other=0.0).to(tl.float32)
        last = tl.load(sums + (row * length + min(start + chunk, length) - 1) * heads + head)
        decay = tl.exp2(total)
        known = state.to(dtype)
        missing = (v.to(tl.float32) - tl.dot(k, known) * decay[:, None]) * strength[:, None]
        written = tl.dot(a, missing.to(dtype))
        # What is behind a row's end is masked before the exponential: its sum is zero, and the difference could be large.
        since = tl.where(earlier & inside[:, None], total[:, None] - total[None, :], -float("inf"))
        attention = tl.dot(q, tl.trans(k)) * tl.exp2(since)
        read = tl.dot(q, known) * decay[:, None] + tl.dot(attention.to(dtype), written.to(dtype))
        tl.store(out + values_at, (read * scale).to(dtype), mask=inside[:, None])
        kept = tl.where(inside, tl.exp2(last - total), 0.0)
        state = state * tl.exp2(last) + tl.dot(tl.trans(k), (written * kept[:, None]).to(dtype))
