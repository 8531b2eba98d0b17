"""What steps of speculation cost on a GPU for a large hybrid target, and so how many tokens a step must commit to pay.

usage: python bench/speculation_gpu.py OUT.json [part ...]

Runs where there is a GPU, PyTorch, Triton and Transformers 5.24 (which may lie in the folder $PEER, with pydantic), and
flash-linear-attention (in $FLA, both folders with a colon between them). A text model of Qwen3.6-27B's shape and the drafter
published for it, both at random: costs do not depend on what is said. One prompt of 512 tokens; the plain loop is
Transformers' own ``generate`` with its cache. ``stock`` does not see $FLA, ``fla`` does. ``floor`` is every matrix product
alone, without a gap between them: what an engine without any overhead would reach. ``exact`` compares answers of a small
hybrid with the plain loop's, ``processes`` what ``evaluate`` decodes one by one, in batches, and on all GPUs.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch
import torch.nn.functional as F
from torch import nn

from bench import parts

TAPS = (1, 16, 31, 46, 61)
PROMPT, NEW, BLOCK = 512, 64, 16
SIZES = (1, 2, 4, 8, 16, 32)
SMALL_TAPS = (0, 3, 6)
CASES = 24
"""Prompts that ``exact`` answers, by each proposer."""


def costs() -> dict[str, Any]:
    """Seconds of a plain token, of steps by the tokens that they read as a chain or as a tree, and of drafting a block."""
    from bench.extract_gpu import make_target
    from foredraft.speculation.proposers import DFlashProposer
    from foredraft.speculation.speed import measure_cost, seconds_of
    from foredraft.speculation.tree import Tree, chain
    from foredraft.target.frozen import FrozenTarget
    from foredraft.target.generate import greedy_answers

    target = FrozenTarget(make_target(), TAPS)
    drafter = make_drafter(TAPS)
    ids = torch.randint(1000, 200_000, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    greedy_answers(target.model, [ids], 8, [0])
    plain = min(seconds_of(lambda: greedy_answers(target.model, [ids], NEW, [0]), target.device)[1] for _ in range(3))
    first = min(seconds_of(lambda: greedy_answers(target.model, [ids], 1, [0]), target.device)[1] for _ in range(3))
    token = (plain - first) / (NEW - 1)
    # What is compiled on first use, at other lengths: those that are timed are new, as they are in decoding.
    measure_cost(target, DFlashProposer(drafter, target), ids[: PROMPT // 2], SIZES, chain)
    chains = measure_cost(target, DFlashProposer(drafter, target), ids, SIZES, chain)
    wide = measure_cost(
        target, DFlashProposer(drafter, target, budget=BLOCK), ids, (BLOCK, 2 * BLOCK), lambda t: fan(t, Tree)
    )
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


def floor() -> dict[str, Any]:
    """Seconds of all matrix products of a plain token, of a step that reads a block, and of drafting one."""
    from bench.extract_gpu import make_target

    model, drafter = make_target(), make_drafter(TAPS)
    token, step = products(model, 1), products(model, BLOCK)
    draft = products(drafter, BLOCK) + products(nn.ModuleList([model.lm_head]), BLOCK - 1)
    return {
        "plain_seconds_per_token": token,
        "verify_seconds": {BLOCK: step},
        "draft_seconds": draft,
        "break_even_tokens_per_step": (step + draft) / token,
    }


def products(module: nn.Module, rows: int) -> float:
    """Seconds of every linear layer of ``module`` on so many rows, as one CUDA graph; the median of 20 replays."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    inputs = {size: torch.randn(rows, size, device="cuda").bfloat16() for size in {one.in_features for one in layers}}

    def work() -> None:
        for layer in layers:
            F.linear(inputs[layer.in_features], layer.weight)

    return replayed(work)


@torch.inference_mode()
def replayed(work: Callable[[], None]) -> float:
    """Seconds of ``work`` as a CUDA graph; the median of 20 replays."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return sorted(times)[len(times) // 2]


def exact() -> dict[str, Any]:
    """Answers of a small hybrid in float32, by drafts at random, trees of them and ones mostly right: any difference.

    A difference is told with the gap between the two likeliest logits of the target where the answers part.
    """
    from foredraft.speculation.decode import decode
    from foredraft.speculation.proposers import DFlashProposer, Proposer
    from foredraft.speculation.session import open_session
    from foredraft.target.frozen import FrozenTarget
    from foredraft.target.generate import greedy_answers

    target = FrozenTarget(small_hybrid().cuda(), SMALL_TAPS)
    drafter = make_drafter(SMALL_TAPS, target.model.config, torch.float32)
    generator = torch.Generator().manual_seed(1)
    differences = []
    accepted = {"chain": 0, "tree": 0, "mostly_right": 0}
    for case in range(CASES):
        prompt = torch.randint(4096, (5 + 7 * case,), generator=generator).tolist()
        (plain,) = greedy_answers(target.model, [prompt], 48, [0])
        proposers: dict[str, Proposer] = {
            "chain": DFlashProposer(drafter, target),
            "tree": DFlashProposer(drafter, target, budget=24),
            "mostly_right": MostlyRight(prompt + plain, generator),
        }
        for name, proposer in proposers.items():
            (trace,) = decode(open_session(target), proposer, [prompt], 48, [0])
            accepted[name] += sum(right for _, right, _ in trace.steps)
            if trace.tokens != plain:
                at = next(i for i, (a, b) in enumerate(zip(trace.tokens, plain, strict=False)) if a != b)
                read = torch.tensor([prompt + plain[:at]], device="cuda")
                best = target.model(read, logits_to_keep=1).logits[0, -1].topk(2).values
                differences.append({"by": name, "case": case, "margin": float(best[0] - best[1])})
    return {"cases": 3 * CASES, "accepted": accepted, "differences": differences}


def small_hybrid() -> Any:
    """At random, in float32."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        tie_word_embeddings=False,
    )
    return Qwen3_5ForCausalLM(config).eval().requires_grad_(False)


def processes() -> dict[str, Any]:
    """What ``evaluate`` decodes of a small hybrid in float32, by its own processes: on one GPU, and on all."""
    from foredraft.launch import process_count
    from foredraft.layouts.zlab import as_stored, write_zlab
    from foredraft.params import load_section
    from foredraft.sources.config import FetchConfig
    from foredraft.speculation.config import EvaluateConfig
    from foredraft.speculation.runs import Job, Prompt, decode_all
    from foredraft.target.config import TargetConfig

    os.environ["FOREDRAFT_SCRATCH"] = folder = tempfile.mkdtemp()
    model, profile = small_hybrid(), ROOT / "profiles/smoke.yaml"
    model.save_pretrained(f"{folder}/target")
    drafter = make_drafter(SMALL_TAPS, model.config, torch.float32).cpu()
    write_zlab(Path(folder) / "drafter", drafter.shape, as_stored(drafter.state_dict()), {"format": "pt"})
    changes = {"max_new_tokens": 48, "tree_budgets": (24,), "dtype": "float32", "speed_prompts": 1}
    config = load_section(profile, "evaluate", EvaluateConfig).model_copy(update=changes)
    target = load_section(profile, "target", TargetConfig).model_copy(update={"uri": f"file:{folder}/target"})
    generator = torch.Generator().manual_seed(1)
    prompts = [
        Prompt("ab"[case % 2], torch.randint(4096, (5 + 7 * case,), generator=generator).tolist())
        for case in range(CASES)
    ]
    gpus, found = process_count(), []
    for count, batch in ((1, 1), (1, CASES), (gpus, 5)):
        os.environ["FOREDRAFT_PROCESSES"] = str(count)
        job = Job(
            config.model_copy(update={"batch_size": batch}),
            target,
            load_section(profile, "fetch", FetchConfig),
            Path(folder) / "drafter",
            prompts,
            [0],
            Path(folder),
        )
        share = decode_all(job)
        found.append({name: [share.runs[name].traces[n] for n in range(CASES)] for name in share.runs})
    said = {name: sum(len(trace.tokens) for trace in traces) for name, traces in found[0].items()}
    return {"gpus": gpus, "prompts": CASES, "tokens": said, "equal": found[0] == found[1] == found[2]}


class MostlyRight:
    """Proposes what the plain loop said, every fifth draft spoilt."""

    def __init__(self, whole: list[int], generator: torch.Generator):
        self._whole, self._generator = whole, generator

    def observe(self, slots: Any) -> None:
        """Features are of no use here."""

    def keep(self, rows: list[int]) -> None:
        """One row."""

    def propose(self, sequences: list[list[int]]) -> list[Any]:
        """Drafts of a block."""
        from foredraft.speculation.tree import chain

        drafts = self._whole[len(sequences[0]) : len(sequences[0]) + BLOCK - 1]
        spoilt = torch.rand(len(drafts), generator=self._generator) < 0.2
        return [chain([token ^ 1 if bad else token for token, bad in zip(drafts, spoilt.tolist(), strict=True)])]


def make_drafter(taps: tuple[int, ...], small: Any = None, dtype: torch.dtype = torch.bfloat16) -> Any:
    """At random, of the shape published for Qwen3.6-27B, or one for a small target of this config."""
    from bench.train_gpu import FFN, HEAD, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCABULARY
    from foredraft.drafter.config import DrafterConfig, DrafterShape
    from foredraft.drafter.model import Drafter, initialise_random

    choice = DrafterConfig(
        num_layers=2 if small else LAYERS,
        num_heads=4 if small else HEADS,
        num_kv_heads=2 if small else KV_HEADS,
        head_dim=HEAD,
        ffn_size=1024 if small else FFN,
        block_size=BLOCK,
        mask_token_id=4095 if small else 248_070,
        sliding_window=2048,
        full_attention_layers=(1 if small else LAYERS - 1,),
    )
    shape = DrafterShape(
        choice=choice,
        hidden_size=small.hidden_size if small else HIDDEN,
        vocab_rows=small.vocab_size if small else VOCABULARY,
        target_layer_ids=taps,
        num_target_layers=small.num_hidden_layers if small else 64,
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        max_position_embeddings=262_144,
    )
    with torch.device("cuda"):
        drafter = Drafter(shape).to(dtype)
    initialise_random(drafter, torch.Generator("cuda").manual_seed(1))
    return drafter.eval().requires_grad_(False)


def fan(tokens: list[int], tree: Any) -> Any:
    """A tree in which every node has two children."""
    return tree(tokens, [(node - 1) // 2 if node else -1 for node in range(len(tokens))])


PARTS: dict[str, parts.Part] = {
    "exact": lambda: {"exact": exact()},
    "processes": lambda: {"processes": processes()},
    "exact_fla": lambda: {"exact_fla": exact()},
    "floor": lambda: {"floor": floor()},
    "stock": lambda: {"stock": costs()},
    "fla": lambda: {"fla": costs()},
}
SEES = {"exact": "PEER", "processes": "PEER", "floor": "PEER", "stock": "PEER", "exact_fla": "FLA", "fla": "FLA"}

if __name__ == "__main__":
    parts.run(__file__, PARTS, list(PARTS), {"shape": "Qwen3.6-27B and its drafter, at random"}, SEES)
