"""What steps of speculation cost on a GPU for a large hybrid target, and so how many tokens a step must commit to pay.

usage: python bench/speculation_gpu.py OUT.json [part ...]

Runs where there is a GPU, PyTorch, Triton and Transformers 5.24 (which may lie in the folder $PEER, with pydantic). A text
model of Qwen3.6-27B's shape and the drafter published for it, both at random: costs do not depend on what is said. One
prompt of 512 tokens; the plain loop is Transformers' own ``generate`` with its cache.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch

from bench import parts

PROMPT, NEW, BLOCK = 512, 64, 16
SIZES = (1, 2, 4, 8, 16, 32)


def costs() -> dict[str, Any]:
    """Seconds of a plain token, of steps by the tokens that they read as a chain or as a tree, and of drafting a block."""
    from bench.extract_gpu import make_target
    from bench.train_gpu import LAYERS
    from foredraft.speculation.proposers import DFlashProposer
    from foredraft.speculation.speed import measure_cost, seconds_of
    from foredraft.speculation.tree import Tree, chain
    from foredraft.target.frozen import FrozenTarget
    from foredraft.target.generate import greedy_answers

    taps = (1, 16, 31, 46, 61)
    target = FrozenTarget(make_target(), taps)
    drafter = make_drafter(taps)
    ids = torch.randint(1000, 200_000, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    greedy_answers(target.model, [ids], 8, [])
    plain = min(seconds_of(lambda: greedy_answers(target.model, [ids], NEW, []), target.device)[1] for _ in range(3))
    first = min(seconds_of(lambda: greedy_answers(target.model, [ids], 1, []), target.device)[1] for _ in range(3))
    token = (plain - first) / (NEW - 1)
    proposer = DFlashProposer(drafter, target)
    chains = measure_cost(target, proposer, ids, SIZES, chain)
    wide = measure_cost(
        target, DFlashProposer(drafter, target, budget=BLOCK), ids, (BLOCK, 2 * BLOCK), lambda t: fan(t, Tree)
    )
    assert drafter.shape.choice.num_layers == LAYERS
    return {
        "plain_seconds_per_token": token,
        "first_token_seconds": first,
        "draft_seconds": chains.draft,
        "verify_seconds": chains.verify,
        "tree_verify_seconds": wide.verify,
        "tree_draft_seconds": wide.draft,
        "break_even_tokens_per_step": (chains.of(BLOCK) + chains.draft) / token,
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
    }


def make_drafter(taps: tuple[int, ...]) -> Any:
    """The shape published for Qwen3.6-27B, at random."""
    from bench.train_gpu import FFN, HEAD, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCABULARY
    from foredraft.drafter.config import DrafterConfig, DrafterShape
    from foredraft.drafter.model import Drafter, initialise_random

    choice = DrafterConfig(
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD,
        ffn_size=FFN,
        block_size=BLOCK,
        mask_token_id=248_070,
        sliding_window=2048,
        full_attention_layers=(LAYERS - 1,),
    )
    shape = DrafterShape(
        choice=choice,
        hidden_size=HIDDEN,
        vocab_rows=VOCABULARY,
        target_layer_ids=taps,
        num_target_layers=64,
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        max_position_embeddings=262_144,
    )
    with torch.device("cuda"):
        drafter = Drafter(shape).to(torch.bfloat16)
    initialise_random(drafter, torch.Generator("cuda").manual_seed(1))
    return drafter.eval().requires_grad_(False)


def fan(tokens: list[int], tree: Any) -> Any:
    """A tree in which every node has two children."""
    return tree(tokens, [(node - 1) // 2 if node else -1 for node in range(len(tokens))])


if __name__ == "__main__":
    parts.run(
        __file__, {"costs": costs}, ["costs"], {"shape": "Qwen3.6-27B and its drafter, at random"}, {"costs": "PEER"}
    )
