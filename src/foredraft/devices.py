"""Which device work is done on."""

import torch


def default_device() -> str:
    """``cuda`` where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"
