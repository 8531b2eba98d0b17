"""Chain speculation, greedy: draft a block, verify it in one target step, commit the leading run and the bonus token."""

import torch

from foredraft.speculation.acceptance import Trace
from foredraft.speculation.proposers import Proposer
from foredraft.speculation.session import Session


@torch.inference_mode()
def decode(
    session: Session, proposer: Proposer, prompts: list[list[int]], max_new_tokens: int, eos: list[int]
) -> list[Trace]:
    """Decode a batch of prompts; every committed token is the target's own argmax, whatever is proposed.

    Args:
        prompts: token ids of each.
        max_new_tokens: per prompt, the first token and the end-of-turn token included.
        eos: ids that end an answer; the one that ends it is committed, nothing behind it is.
    """
    logits, slots = session.prefill(prompts)
    proposer.observe(slots)
    traces = [Trace(tokens=[token]) for token in logits.argmax(-1).tolist()]
    open_rows = [max_new_tokens > 1 and trace.tokens[-1] not in eos for trace in traces]
    while any(open_rows):
        proposals = proposer.propose([prompt + trace.tokens for prompt, trace in zip(prompts, traces, strict=True)])
        width = 1 + max(map(len, proposals))
        block = [
            # Rows with fewer drafts repeat their last token: it is verified like the others and never counted.
            [trace.tokens[-1], *drafts] + [trace.tokens[-1]] * (width - 1 - len(drafts))
            for trace, drafts in zip(traces, proposals, strict=True)
        ]
        verdicts = session.verify(torch.tensor(block, device=slots.positions.device)).argmax(-1).tolist()  # (B, S)
        kept = []
        for row, trace in enumerate(traces):
            kept.append(_commit(trace, proposals[row], verdicts[row], max_new_tokens, eos) if open_rows[row] else 0)
            open_rows[row] &= len(trace.tokens) < max_new_tokens and trace.tokens[-1] not in eos
        slots = session.commit(torch.tensor(kept, device=slots.positions.device))
        proposer.observe(slots)
    return traces


def _commit(trace: Trace, drafts: list[int], verdicts: list[int], max_new_tokens: int, eos: list[int]) -> int:
    """Extend ``trace`` by one step; returns how many tokens of the verified block stay in the cache."""
    run = 0
    while run < len(drafts) and drafts[run] == verdicts[run]:
        run += 1
    new = verdicts[: run + 1][: max_new_tokens - len(trace.tokens)]
    end = next((i for i, token in enumerate(new) if token in eos), len(new))
    new = new[: end + 1]
    # Where the answer ends inside the block, drafts behind the end were neither right nor wrong.
    offered = len(drafts) if len(new) == run + 1 else min(len(drafts), len(new))
    trace.steps.append((offered, min(run, len(new)), len(new)))
    trace.tokens += new
    return run + 1
