"""Runs in z-lab's environment, not in ours: loads an exported drafter with z-lab's own code.

usage: zlab_peer.py TARGET DRAFTER PROMPTS.json MAX_NEW OUT.safetensors

Writes, for prompt ``i``: ``tokens.i``, what ``dflash_generate`` says greedily; ``steps.i``, how many blocks it drafted for
that; and ``logits.i``, the drafter's logits for the first block after the prompt, ``(slots - 1, vocabulary)``. Everything in
fp32.
"""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from dflash.model import DFlashDraftModel, dflash_generate, extract_context_feature
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def first_block_logits(drafter: DFlashDraftModel, target: torch.nn.Module, prompt: torch.Tensor) -> torch.Tensor:
    """Draft logits of the block that is anchored on the first generated token."""
    output = target(prompt, output_hidden_states=True)
    context = extract_context_feature(output.hidden_states, drafter.target_layer_ids)
    block = torch.full((1, drafter.block_size), drafter.mask_token_id)
    block[:, 0] = output.logits[:, -1].argmax(-1)
    hidden = drafter(
        target_hidden=context,
        noise_embedding=target.get_input_embeddings()(block),
        position_ids=torch.arange(prompt.shape[1] + drafter.block_size)[None],
    )
    return target.lm_head(hidden[0, 1:])


def main() -> None:
    target_folder, drafter_folder, prompts_file, max_new, out = sys.argv[1:]
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    drafter, report = DFlashDraftModel.from_pretrained(drafter_folder, dtype=torch.float32, output_loading_info=True)
    if report["missing_keys"] or report["unexpected_keys"]:
        sys.exit(f"{drafter_folder}: missing {report['missing_keys']}, unexpected {report['unexpected_keys']}")
    drafter.eval()
    stops = target.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    found, drafted = {}, []
    drafter.register_forward_hook(lambda *_: drafted.append(1))
    with torch.inference_mode():
        for index, ids in enumerate(json.loads(Path(prompts_file).read_text(encoding="utf-8"))):
            prompt = torch.tensor([ids])
            drafted.clear()
            tokens = dflash_generate(drafter, target, prompt, int(max_new), stops)
            found[f"tokens.{index}"] = tokens[0, len(ids) :].contiguous()
            found[f"steps.{index}"] = torch.tensor(len(drafted))
            found[f"logits.{index}"] = first_block_logits(drafter, target, prompt).contiguous()
    save_file(found, out)


if __name__ == "__main__":
    main()
