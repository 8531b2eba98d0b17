"""Which device work is done on, and what PyTorch does there."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def default_device() -> str:
    """``cuda`` where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def growing_text() -> Iterator[None]:
    """While a text is read token by token: attention without cuDNN, which plans anew for every length (see LOG.md)."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
