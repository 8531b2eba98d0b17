"""Blocks of drafts, as they are filled in decoding."""

import torch
from torch import Tensor

from foredraft.drafter.attention import Attention, KeysValues, MaskedAttention, decoding_mask
from foredraft.drafter.model import Drafter


def fill_blocks(
    drafter: Drafter, embeddings: Tensor, anchors: Tensor, context: list[KeysValues], positions: Tensor, valid: Tensor
) -> Tensor:
    """Hidden states of one block a row.

    Args:
        embeddings: the target's, of the anchor and of mask tokens behind it: ``(B, S, D)``.
        anchors: ``(B)`` position of each row's slot 0.
        context: :meth:`Drafter.read_context` of the tokens so far.
        positions, valid: of those, ``(B, T)``; those that are not valid are not read.

    Returns:
        ``(B, S, D)``, for the target's LM head; slot k is a draft of the token k places behind the anchor.
    """
    choice, size = drafter.shape.choice, embeddings.shape[1]
    attention: dict[str, Attention] = {}
    for kind in set(choice.layer_types):
        window = None if kind == "full_attention" else choice.sliding_window
        attention[kind] = MaskedAttention(decoding_mask(anchors, size, positions, valid, window))
    places = anchors[:, None] + torch.arange(size, device=anchors.device)
    return drafter.fill(embeddings, places, context, attention)
