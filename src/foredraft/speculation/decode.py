"""Speculative decoding: draft a tree, read it in one step of the target, commit what is right and one token more."""

import torch

from foredraft.devices import growing_text
from foredraft.speculation.acceptance import Trace
from foredraft.speculation.proposers import Proposer
from foredraft.speculation.session import Session
from foredraft.speculation.tree import Tree
from foredraft.speculation.verdicts import Greedy, Verdicts, walk


@growing_text()
@torch.inference_mode()
def decode(
    session: Session,
    proposer: Proposer,
    prompts: list[list[int]],
    max_new_tokens: int,
    eos: list[int],
    verdicts: Verdicts | None = None,
) -> list[Trace]:
    """Decode a batch of prompts; every committed token is the target's own, whatever is proposed.

    Args:
        prompts: token ids of each.
        max_new_tokens: per prompt, the first token and the end-of-turn token included.
        eos: ids that end an answer; the one that ends it is committed, nothing behind it is.
        verdicts: greedy by default.
    """
    verdicts = verdicts or Greedy()
    logits, slots = session.prefill(prompts)
    proposer.observe(slots)
    traces = [Trace(tokens=[token]) for token in verdicts.first(logits)]

    def is_open(row: int) -> bool:
        return len(traces[row].tokens) < max_new_tokens and traces[row].tokens[-1] not in eos

    rows = list(range(len(prompts)))
    while any(map(is_open, rows)):
        left = [place for place, row in enumerate(rows) if is_open(row)]
        if len(left) < len(rows):
            rows = [rows[place] for place in left]
            for part in (session, proposer, verdicts):
                part.keep(left)
        trees = proposer.propose([prompts[row] + traces[row].tokens for row in rows])
        verdicts.read(session.verify([traces[row].tokens[-1] for row in rows], trees))
        paths: list[list[int]] = []
        for place, (row, tree) in enumerate(zip(rows, trees, strict=True)):
            path, said = walk(tree, place, verdicts)
            commit(traces[row], tree, said, max_new_tokens, eos)
            paths.append(path if is_open(row) else [])
        if any(paths):
            proposer.observe(session.commit(paths))
    return traces


def commit(trace: Trace, tree: Tree, said: list[int], max_new_tokens: int, eos: list[int]) -> None:
    """Extend ``trace`` by a step in which the target said this, the last of it behind the last right draft."""
    new = said[: max_new_tokens - len(trace.tokens)]
    end = next((i for i, token in enumerate(new) if token in eos), len(new))
    new = new[: end + 1]
    trace.steps.append((tree.depth, min(len(said) - 1, len(new)), len(new)))
    trace.tokens += new
