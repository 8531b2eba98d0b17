"""How much of the held-out prompts a drafter has seen in training: runs of tokens that stand in both."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.speculation.runs import Prompt

RUN = 13
"""Tokens of a run; as GPT-3's authors looked for (arXiv 2005.14165, appendix C)."""


def overlap(prompts: list[Prompt], training: Iterable[NDArray[np.int32]]) -> dict[str, dict[str, Any]]:
    """By benchmark: how many prompts there are whose user's words hold such a run, and how many of those and of their runs
    stand in ``training``, the ids of documents.

    Prompts' runs are held in memory, and training documents are looked at as they come.
    """
    own = [np.unique(runs_of(np.array(prompt.asked, dtype=np.int32))) for prompt in prompts]
    wanted = np.unique(np.concatenate([*own, np.empty(0, np.uint64)]))
    seen = np.zeros(len(wanted), dtype=bool)
    for ids in training:
        seen |= np.isin(wanted, runs_of(ids))
    found: dict[str, dict[str, Any]] = {}
    for prompt, runs in zip(prompts, own, strict=True):
        sums = found.setdefault(prompt.benchmark, {"prompts": 0, "prompts_seen": 0, "runs": 0, "runs_seen": 0})
        here = int(seen[np.searchsorted(wanted, runs)].sum())
        sums["prompts"] += len(runs) > 0
        sums["prompts_seen"] += here > 0
        sums["runs"] += len(runs)
        sums["runs_seen"] += here
    return dict(sorted(found.items()))


def runs_of(ids: NDArray[np.int32]) -> NDArray[np.uint64]:
    """A number for each run of :data:`RUN` ids, ``(max(0, T - RUN + 1))``; equal runs have equal ones."""
    if len(ids) < RUN:
        return np.empty(0, np.uint64)
    odd = np.array([pow(0x9E3779B97F4A7C15, power + 1, 2**64) for power in range(RUN)], dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64) + np.uint64(1), RUN)
    mixed: NDArray[np.uint64] = (windows * odd).sum(-1, dtype=np.uint64)
    return mixed
