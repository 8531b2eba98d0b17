"""A drafter from a folder, in whichever layout it is."""

from pathlib import Path

import torch

from foredraft.drafter.config import DrafterShape
from foredraft.drafter.model import Drafter
from foredraft.layouts.speculators import MARK, read_speculators, read_speculators_shape
from foredraft.layouts.zlab import read_config, read_shape, read_zlab


def read_drafter(folder: Path, dtype: torch.dtype, num_target_layers: int | None = None) -> Drafter:
    """Load a drafter from z-lab's layout or from that of speculators.

    Args:
        num_target_layers: where the folder does not say.

    Raises:
        ArtifactError: there is none, or not one of ours; names what is wrong.
    """
    if MARK in read_config(folder):
        return read_speculators(folder, dtype, num_target_layers)
    return read_zlab(folder, dtype)


def read_drafter_shape(folder: Path, num_target_layers: int | None = None) -> DrafterShape:
    """Its shape alone."""
    if MARK in read_config(folder):
        return read_speculators_shape(folder, num_target_layers)
    return read_shape(folder)
