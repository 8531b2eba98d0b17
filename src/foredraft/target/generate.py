"""The target's own answers, by Transformers: training data, and what speculation must reproduce."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from foredraft.devices import growing_text
from foredraft.target.frozen import attends_to_everything


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: 0 takes the likeliest.
        top_p: among the likeliest tokens that hold this share of what ``top_k`` left.
        top_k: among so many of the likeliest; 0: all.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0

    def settings(self) -> dict[str, Any]:
        """For Transformers; what the checkpoint's own generation config says of sampling does not count."""
        if self.temperature == 0:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}


def greedy_answers(model: Any, prompts: list[list[int]], max_new_tokens: int, eos: list[int]) -> list[list[int]]:
    """Answer a batch of prompts with the likeliest token each time; see :func:`batched_answers`."""
    return batched_answers(model, prompts, max_new_tokens, eos, Sampling())


@growing_text()
@torch.inference_mode()
def batched_answers(
    model: Any,
    prompts: list[list[int]],
    max_new_tokens: int,
    eos: list[int],
    sampling: Sampling,
    static_cache: bool | None = None,
) -> list[list[int]]:
    """Answer prompts as one batch; an answer ends with the first end-of-turn token, if it came.

    Padding is on the left and told by the mask, never by its id, which often is the end-of-turn token.

    Args:
        prompts: token ids of each.
        eos: every id that ends an answer.
        static_cache: lay the cache out at once instead of letting it grow; by default where that is faster.
    """
    if static_cache is None:
        # A growing cache is copied whole for every token, which halves the speed on a CPU.
        static_cache = model.device.type == "cpu" and attends_to_everything(model)
    longest = max(map(len, prompts))
    input_ids = torch.full((len(prompts), longest), eos[0])  # (B, T)
    mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    # Transformers draws from the global generator: it is ours while it does.
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []), _no_habits(model):
        torch.manual_seed(sampling.seed)
        output = model.generate(
            input_ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max_new_tokens,
            eos_token_id=eos,
            pad_token_id=eos[0],
            cache_implementation="static" if static_cache else None,
            **sampling.settings(),
        )
    return [cut_at_end(answer, set(eos)) for answer in output[:, longest:].tolist()]


@contextmanager
def _no_habits(model: Any) -> Iterator[None]:
    """Set aside what the checkpoint says of generating (a repetition penalty, ...): it would fill what is left open."""
    habits = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = habits


def continuous_answers(
    model: Any, prompts: list[list[int]], max_new_tokens: int, eos: list[int], sampling: Sampling, warmup: bool = True
) -> list[list[int]]:
    """Answer prompts by continuous batching: a row that is done makes room for the next at once, and nothing is padded.

    Raises:
        RuntimeError: a request failed; says why.
    """
    from transformers import ContinuousBatchingConfig

    config = GenerationConfig(
        max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=eos[0], **sampling.settings()
    )
    drawn = ContinuousBatchingConfig(seed=sampling.seed)
    with _no_habits(model):
        found = model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=drawn, warmup=warmup, progress_bar=False
        )
    outputs = [found[name] for name in sorted(found, key=lambda name: int(name.rpartition("_")[2]))]
    if failed := next((output.error for output in outputs if output.error), None) or len(outputs) != len(prompts):
        raise RuntimeError(f"continuous batching: {len(outputs)} of {len(prompts)} prompts answered ({failed})")
    return [cut_at_end(list(output.generated_tokens), set(eos)) for output in outputs]


def batches_continuously(model: Any) -> bool:
    """Whether the installed packages can, and it pays: on a GPU with FlashAttention, where every layer is plain attention.

    Without FlashAttention it was slower than padded batches (LOG.md has the figures).
    """
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    flash = is_flash_attn_2_available() or is_flash_attn_3_available()
    can = model.device.type == "cuda" and hasattr(model, "generate_batch")
    return can and flash and attends_to_everything(model)


def cut_at_end(tokens: list[int], eos: set[int]) -> list[int]:
    """Drop what follows the first end-of-turn token, which is kept."""
    end = next((i for i, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[: end + 1]
