"""The target's own greedy answers, by Transformers' ``generate``: training data, and what speculation must reproduce."""

from typing import Any

import torch

from foredraft.target.frozen import attends_to_everything


@torch.inference_mode()
def greedy_answers(model: Any, prompts: list[list[int]], max_new_tokens: int, eos: list[int]) -> list[list[int]]:
    """Answer a batch of prompts; an answer ends with the first end-of-turn token, if it came.

    Padding is on the left and told by the mask, never by its id, which often is the end-of-turn token.

    Args:
        prompts: token ids of each.
        eos: every id that ends an answer.
    """
    longest = max(map(len, prompts))
    input_ids = torch.full((len(prompts), longest), eos[0])  # (B, T)
    mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    output = model.generate(
        input_ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=eos[0],
        # Where it is possible: a growing cache is copied whole for every token, which halves the speed on a CPU.
        cache_implementation="static" if attends_to_everything(model) else None,
    )
    return [cut_at_end(answer, set(eos)) for answer in output[:, longest:].tolist()]


def cut_at_end(tokens: list[int], eos: set[int]) -> list[int]:
    """Drop what follows the first end-of-turn token, which is kept."""
    end = next((i for i, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[: end + 1]
