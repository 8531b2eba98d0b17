"""The frozen target: loaded as Transformers loads it, tapped by hooks.

A tap k is the residual stream after 0-based decoder block k, before any final norm. Hooks on the blocks give it for
every k, the last block included, where ``output_hidden_states`` would already have been normed.

Rows are padded on the right and read without a mask: no token looks ahead, neither through attention nor through a recurrent
state, so what stands behind a row's end cannot reach it. Padding on the left would be read.

Shapes: ``B`` sequences, ``T`` tokens, ``L`` taps, ``D`` hidden size, ``V`` vocabulary rows.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from foredraft.devices import default_device
from foredraft.target.config import TargetConfig


class FrozenTarget:
    """A causal LM that is only read.

    Attributes:
        model: the Transformers model, in eval mode, without gradients.
        layer_ids: the tapped blocks.
        in_place: a block adds to its own input, so what a tap shows must be copied before the next block runs.
    """

    def __init__(self, model: Any, layer_ids: Sequence[int]):
        self.model: Any = model.eval().requires_grad_(False)
        self.layer_ids = tuple(layer_ids)
        self.in_place = False
        self.blocks: nn.ModuleList = self.decoder.layers
        check_layer_ids(self.layer_ids, len(self.blocks))
        self._captured: dict[int, Tensor] = {}
        self._on_tap: OnTap = self._keep
        self._last: int | None = None
        for layer_id in self.layer_ids:
            self.blocks[layer_id].register_forward_hook(self._hook(layer_id))
        # On a view with a gap, such as the last position of every row, a product copies the whole head once for each row.
        self.head.register_forward_pre_hook(lambda _head, inputs: (inputs[0].contiguous(),))

    @property
    def decoder(self) -> Any:
        """The text model without its LM head, also inside a vision wrapper."""
        return self.model.get_decoder()

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.model.device

    @property
    def head(self) -> nn.Linear:
        """The LM head (tied or not), found through the model, never by a key's name."""
        return self.model.get_output_embeddings()

    @property
    def embeddings(self) -> nn.Embedding:
        """The input embeddings."""
        return self.model.get_input_embeddings()

    def read(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Read right-padded rows ``(B, T)`` without a cache and without logits.

        Returns:
            taps ``(B, T, L, D)`` and the final hidden states after the final norm ``(B, T, D)``.
        """
        output = self.decoder(input_ids=input_ids, use_cache=False)
        return self.taps(), output.last_hidden_state

    def stream(self, input_ids: Tensor, on_tap: "OnTap", final: bool = True) -> Tensor | None:
        """Read right-padded rows ``(B, T)``, handing each tap over as soon as it is there.

        Args:
            on_tap: called with a block's id and its ``(B, T, D)``, which is overwritten afterwards where ``in_place``.
            final: whether the states after the final norm are wanted; without them no block after the last tap runs.

        Returns:
            the final hidden states ``(B, T, D)``, or ``None``.
        """
        self._on_tap, self._last = on_tap, None if final else max(self.layer_ids)
        try:
            return self.decoder(input_ids=input_ids, use_cache=False).last_hidden_state
        except _EnoughError:
            return None
        finally:
            self._on_tap, self._last = self._keep, None

    def step(self, input_ids: Tensor, cache: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Feed tokens on top of ``cache``; returns taps ``(B, T, L, D)`` and logits ``(B, T, V)``."""
        output = self.model(input_ids=input_ids, cache=cache, use_cache=True, **kwargs)
        return self.taps(), output.logits

    def taps(self) -> Tensor:
        """What the hooks saw in the last forward pass, ``(B, T, L, D)``."""
        return torch.stack([self._captured[layer_id] for layer_id in self.layer_ids], dim=2)

    def _keep(self, layer_id: int, states: Tensor) -> None:
        self._captured[layer_id] = states.clone() if self.in_place else states

    def _hook(self, layer_id: int) -> Any:
        def hook(_block: nn.Module, _inputs: Any, output: Any) -> None:
            self._on_tap(layer_id, output[0] if isinstance(output, tuple) else output)
            if layer_id == self._last:
                raise _EnoughError

        return hook


OnTap = Callable[[int, Tensor], None]


class _EnoughError(Exception):
    """Every tap has been read."""


def check_layer_ids(layer_ids: Sequence[int], layers: int) -> None:
    """Refuse taps that are repeated or out of range.

    Raises:
        ValueError: names the ids and the number of layers.
    """
    if not layer_ids or len(set(layer_ids)) != len(layer_ids) or not all(0 <= k < layers for k in layer_ids):
        raise ValueError(
            f"target_layer_ids = {list(layer_ids)}: expected distinct 0-based decoder blocks of a target "
            f"that has {layers} (0 to {layers - 1})"
        )


def require_inner_taps(ids: Sequence[int], layers: int) -> None:
    """Refuse a tap on the target's last block, whose state some engines read after the final norm and others never.

    Raises:
        ValueError: there is one.
    """
    if layers - 1 in ids:
        raise ValueError(
            f"extract.target_layer_ids: {layers - 1} is the target's last block, whose state engines read after the final "
            f"norm or not at all; take blocks up to {layers - 2}"
        )


def attends_to_everything(model: Any) -> bool:
    """Whether every layer of the model's cache is plain attention: no window, no recurrent state."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


def load_target(
    folder: Path, config: TargetConfig, layer_ids: Sequence[int], device: str | None = None
) -> FrozenTarget:
    """Load the checkpoint in ``folder`` the stock way: no blanket cast, so ``A_log`` and its kin keep their dtype.

    Raises:
        ValueError: the checkpoint lacks weights of the model, or has them in another shape; Transformers would draw them at
            random and say so in a warning.
    """
    load: Any = AutoModelForCausalLM.from_pretrained
    model, loaded = load(
        folder,
        dtype=getattr(torch, config.dtype),
        trust_remote_code=config.trust_remote_code,
        ignore_mismatched_sizes=True,  # told below, by name
        output_loading_info=True,
    )
    lacking = sorted({*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])})
    if lacking:
        unread = ", ".join(sorted(loaded["unexpected_keys"])[:3]) or "none"
        raise ValueError(
            f"{folder}: no weights of the right shape for {', '.join(lacking[:3])} ({len(lacking)} in all); "
            f"names there that {type(model).__name__} does not know: {unread}"
        )
    return FrozenTarget(model.to(device or default_device()), layer_ids)
