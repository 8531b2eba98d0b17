"""Is what was read off the target true, and sane?

Two checks: before the work, on a few documents, against the target's own outputs; and of every shard, before it is
written. Zero, constant or non-finite states train without an error and serve at no acceptance.
"""

import torch
from torch import Tensor

from foredraft.target.frozen import FrozenTarget

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


def truth_check(target: FrozenTarget, documents: list[Tensor]) -> dict[str, float]:
    """Compare hooks, rebuilt logits and batching with the target's own outputs on a few documents.

    Args:
        documents: token ids, one ``(T)`` tensor each.

    Returns:
        the largest differences found, for the record.

    Raises:
        ValueError: the target's stock path and the path used for extraction disagree; names the check.
    """
    worst = {"logits": 0.0, "taps": 0.0, "batched": 0.0}
    together, mask = pad(documents)
    batched, _ = target.read(together.to(target.device), mask.to(target.device))
    for row, ids in enumerate(documents):
        one = ids[None].to(target.device)
        stock = target.model(input_ids=one, output_hidden_states=True, use_cache=False)
        taps, final = target.read(one, torch.ones_like(one))
        logits = target.head(final)
        scale = stock.logits.float().abs().max().item()
        worst["logits"] = max(worst["logits"], _difference(logits, stock.logits) / scale)
        if not bool((logits.argmax(-1) == stock.logits.argmax(-1)).all()):
            raise ValueError(
                "truth check: the LM head on the final hidden states does not give the target's own argmax"
            )
        for index, layer_id in enumerate(target.layer_ids):
            if layer_id + 1 < len(target.blocks):  # the last entry of hidden_states is after the final norm
                expected = stock.hidden_states[layer_id + 1]
                worst["taps"] = max(worst["taps"], _relative(taps[:, :, index], expected))
        worst["batched"] = max(worst["batched"], _relative(batched[row : row + 1, : len(ids)], taps))
    tolerance = TOLERANCE[target.head.weight.dtype]
    for check, difference in worst.items():
        if difference > tolerance:
            raise ValueError(f"truth check: {check} differ by {difference:.3g} of their size, tolerance {tolerance}")
    return worst


def shard_statistics(target_hidden: Tensor, layer_ids: tuple[int, ...], name: str) -> list[dict[str, float]]:
    """Mean, standard deviation and share of zeros of each tap of ``(T, L, D)`` states.

    Raises:
        ValueError: a token's state is non-finite, all zero or constant; names the shard, tap and first token.
    """
    statistics = []
    for index, layer_id in enumerate(layer_ids):
        tap = target_hidden[:, index].float()  # (T, D)
        for problem, rows in {
            "not finite": ~tap.isfinite().all(-1),
            "constant": tap.amax(-1) == tap.amin(-1),
        }.items():
            if bool(rows.any()):
                first = int(rows.nonzero()[0])
                raise ValueError(
                    f"{name}: {int(rows.sum())} states after block {layer_id} are {problem}, first: token {first}"
                )
        statistics.append(
            {"mean": float(tap.mean()), "std": float(tap.std()), "zeros": float((tap == 0).float().mean())}
        )
    return statistics


def pad(documents: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Right-pad ``(T)`` documents to ``(B, T)`` ids and mask. Never on the left: recurrent layers would read it."""
    lengths = torch.tensor([len(ids) for ids in documents])
    input_ids = torch.nn.utils.rnn.pad_sequence([ids.long() for ids in documents], batch_first=True)
    return input_ids, (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()


def _difference(a: Tensor, b: Tensor) -> float:
    return (a.float() - b.float()).abs().max().item()


def _relative(a: Tensor, b: Tensor) -> float:
    return _difference(a, b) / max(b.float().abs().max().item(), 1e-12)
