"""Runs in speculators' environment, not in ours: loads an exported drafter with speculators' own code.

usage: speculators_peer.py DRAFTER SAMPLE.safetensors OUT.safetensors

The sample holds ``input_ids (T)`` and ``target_hidden (T, L, D)``; its last token is the anchor of a block. Writes
``logits``, the drafter's for that block's drafts, ``(slots - 1, vocabulary)``, and ``taps``, the numbers by which it asks
for states. Everything in fp32.
"""

import os
import sys
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"

import speculators.models.dflash.core as core
import torch
from safetensors.torch import load_file, save_file


def main() -> None:
    folder, sample_file, out = sys.argv[1:]
    drafter = core.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    sample, block = load_file(sample_file), drafter.config.block_size
    ids = torch.nn.functional.pad(sample["input_ids"].long(), (0, block))[None]
    states = torch.nn.functional.pad(sample["target_hidden"].float().flatten(1), (0, 0, 0, block))[None]
    length, anchor = ids.shape[1], len(sample["input_ids"]) - 1
    anchors = (torch.tensor([anchor]), torch.tensor([True]))
    with torch.inference_mode(), mock.patch.object(core, "select_anchors", lambda *_: anchors):
        _, logits, *_ = drafter._backbone_forward(
            hidden_states=states,
            input_ids=ids,
            loss_mask=torch.ones(1, length, dtype=torch.long),
            verifier_last_hidden_states=torch.zeros(1, length, drafter.hidden_size),
            document_ids=torch.zeros(1, length, dtype=torch.long),
            position_ids=torch.arange(length)[None],
            max_anchors=1,
        )
    taps = torch.tensor(drafter.config.aux_hidden_state_layer_ids)
    save_file({"logits": logits[0, 1:block].contiguous(), "taps": taps}, out)


if __name__ == "__main__":
    main()
