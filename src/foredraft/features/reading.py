"""One batch of documents through the target: what is stored of it, and whether it is sane.

Shapes: ``N`` tokens of the batch without padding, ``L`` taps, ``D`` hidden size, ``M`` supervised tokens, ``K`` top-k,
``V`` vocabulary rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.features import taps
from foredraft.features.batching import pad
from foredraft.target.frozen import FrozenTarget
from foredraft.target.kernels import has_triton, to_device

HEAD_ROWS = {"cuda": (4096, 4096), "cpu": (1024, 64)}
"""Supervised positions whose logits are held at once, and how many are looked at together: on a CPU what fits its cache."""
GROUP = 512
"""Logits that are looked at through their largest alone."""


@dataclass
class Reading:
    """What one batch came to; on the target's device until :meth:`to_host`."""

    input_ids: Tensor  # (N) int32: what the target was given
    hidden: Tensor  # (N, L, D)
    scale: Tensor | None  # (N, L)
    faults: Tensor  # (N, L) uint8
    sums: Tensor  # (L, 3) float64: of values, of squares, of zeros
    topk_ids: Tensor  # (M, K) int32
    topk_logprobs: Tensor  # (M, K)
    arrived: torch.cuda.Event | None = None

    def to_host(self, stream: "torch.cuda.Stream | None") -> "Reading":
        """Begin to copy to pinned memory, beside the work that follows; :meth:`wait` before a value is used."""
        if stream is None:
            return self
        stream.wait_stream(torch.cuda.current_stream())
        copied = {}
        with torch.cuda.stream(stream):
            for name, tensor in vars(self).items():
                if isinstance(tensor, Tensor):
                    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                    copied[name] = host.copy_(tensor, non_blocking=True)
                    tensor.record_stream(stream)
            arrived = torch.cuda.Event()
            arrived.record(stream)
        return Reading(**{**vars(self), **copied, "arrived": arrived})

    def wait(self) -> None:
        """Until the copy is there."""
        if self.arrived is not None:
            self.arrived.synchronize()


class Reader:
    """Reads batches with a target.

    Args:
        storage: type of the stored states.
        top_k: the target's likeliest tokens to keep at each supervised token; with 0 the last blocks are not run.
    """

    def __init__(self, frozen: FrozenTarget, storage: torch.dtype, top_k: int):
        self._frozen, self._storage, self._top_k = frozen, storage, top_k
        self._head = Head(frozen)
        self._take_tap = taps.take_tap
        if frozen.device.type == "cuda" and has_triton():
            from foredraft.features import fused_taps

            self._take_tap = fused_taps.take_tap

    @torch.inference_mode()
    def read(self, documents: list[tuple[Tensor, Tensor]]) -> Reading:
        """Read ids and mask ``(T)`` of each document; on a GPU this returns while the work goes on."""
        device, layer_ids = self._frozen.device, self._frozen.layer_ids
        padded = pad([ids for ids, _ in documents])
        width = padded.shape[1]
        places = torch.cat([row * width + torch.arange(len(ids)) for row, (ids, _) in enumerate(documents)])
        mask = torch.cat([mask for _, mask in documents]).bool()
        on_device, places_on_device = to_device(padded, device), to_device(places, device)
        scale: Tensor | None = None
        shape = (len(places), len(layer_ids))
        hidden = torch.empty(*shape, self._frozen.embeddings.embedding_dim, dtype=self._storage, device=device)
        if self._storage == torch.float8_e4m3fn:
            scale = torch.empty(shape, device=device)
        faults = torch.empty(shape, dtype=torch.uint8, device=device)
        sums = torch.empty(len(layer_ids), 3, dtype=torch.float64, device=device)

        def on_tap(layer_id: int, states: Tensor) -> None:
            tap = layer_ids.index(layer_id)
            part = None if scale is None else scale[:, tap]
            sums[tap] = self._take_tap(states.flatten(0, 1), places_on_device, hidden[:, tap], part, faults[:, tap])

        final = self._frozen.stream(on_device, on_tap, final=self._top_k > 0)
        count = int(mask.sum())
        if final is None:
            ids = torch.empty(count, 0, dtype=torch.int32, device=device)
            logprobs = torch.empty(count, 0, device=device)
        else:
            # The logits that predict a token stand one position earlier.
            before = to_device(places[mask] - 1, device)
            ids, logprobs = self._head.top(final.reshape(-1, final.shape[-1]), before, self._top_k)
        given = on_device.reshape(-1).index_select(0, places_on_device).int()
        return Reading(given, hidden, scale, faults, sums, ids, logprobs)


class Head:
    """The target's own likeliest next tokens, without ever holding the logits of a whole batch."""

    def __init__(self, frozen: FrozenTarget):
        self._head = frozen.head
        self._rows, self._together = HEAD_ROWS.get(frozen.device.type, HEAD_ROWS["cuda"])

    def top(self, final: Tensor, places: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Ids ``(M, K)`` int32 and log-probabilities ``(M, K)`` of the ``k`` likeliest after each of ``places (M)``."""
        chunks = (self._head(final.index_select(0, part)) for part in places.split(self._rows))
        found = [largest_logprobs(part, k) for logits in chunks for part in logits.split(self._together)]
        if not found:
            return final.new_empty(0, k, dtype=torch.int32), final.new_empty(0, k, dtype=torch.float32)
        return torch.cat([ids for ids, _ in found]), torch.cat([logprobs for _, logprobs in found])


def largest_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids int32 and log-probabilities float32 of the ``k`` largest of each row of ``(M, V)``."""
    top = largest(logits, k)
    return top.int(), logits.log_softmax(-1, dtype=torch.float32).gather(-1, top)


def largest(logits: Tensor, k: int) -> Tensor:
    """Indices of the ``k`` largest of each row of ``(M, V)``, largest first.

    The ``k`` largest of a row lie in the ``k`` groups whose largest are the largest: one pass over the row finds those, and
    only they are sorted. Of equal values any may be taken, as with ``topk``.
    """
    rows, size = logits.shape
    groups = size // GROUP
    if size % GROUP or groups <= k:
        return logits.topk(k).indices
    grouped = logits.view(rows, groups, GROUP)
    chosen = grouped.amax(-1).topk(k).indices  # (M, k) groups
    inside = grouped.gather(1, chosen[:, :, None].expand(-1, -1, GROUP))  # (M, k, GROUP)
    best = inside.flatten(1).topk(k).indices
    return chosen.gather(1, best // GROUP) * GROUP + best % GROUP
