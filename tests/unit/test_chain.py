"""Whatever is proposed, what comes out is the target's own greedy answer."""

import pytest
import torch

from foredraft.speculation.acceptance import Trace, pool
from foredraft.speculation.decode import decode
from foredraft.speculation.proposers import DFlashProposer, LookupProposer, Proposer
from foredraft.speculation.session import ReplaySession, Slots, TreeSession, open_session
from foredraft.target.frozen import FrozenTarget
from foredraft.target.generate import greedy_answers
from tests.conftest import TAPS, VOCABULARY, tiny_drafter, tiny_hybrid, tiny_llama


class Scripted:
    """Proposes the reference with some drafts spoilt; ``spoil`` is the share."""

    def __init__(self, prompts: list[list[int]], references: list[list[int]], drafts: int, spoil: float):
        self._whole = {tuple(p): p + r for p, r in zip(prompts, references, strict=True)}
        self._drafts, self._spoil = drafts, spoil
        self._generator = torch.Generator().manual_seed(0)

    def observe(self, slots: Slots) -> None:
        pass

    def propose(self, sequences: list[list[int]]) -> list[list[int]]:
        return [self._continue(sequence) for sequence in sequences]

    def _continue(self, sequence: list[int]) -> list[int]:
        whole = next(w for p, w in self._whole.items() if tuple(sequence[: len(p)]) == p)
        drafts = whole[len(sequence) : len(sequence) + self._drafts]
        spoilt = torch.rand(len(drafts), generator=self._generator) < self._spoil
        return [(token + 1) % VOCABULARY if bad else token for token, bad in zip(drafts, spoilt, strict=True)]


def some_prompts(count: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (2 + 3 * i,), generator=generator).tolist() for i in range(count)]


def greedy(target: FrozenTarget, prompts: list[list[int]], new: int, eos: list[int]) -> list[list[int]]:
    return [greedy_answers(target.model, [prompt], new, eos)[0] for prompt in prompts]


@pytest.mark.parametrize("size", [2, 4, 7])
@pytest.mark.parametrize("spoil", [0.0, 0.3, 1.0])
def test_output_is_greedy_whatever_is_accepted(tiny_target: FrozenTarget, size: int, spoil: float) -> None:
    prompts, eos = some_prompts(), [VOCABULARY + 1]
    references = greedy(tiny_target, prompts, 24, eos)
    for prompt, reference in zip(prompts, references, strict=True):
        proposer = Scripted([prompt], [reference], size - 1, spoil)
        (trace,) = decode(open_session(tiny_target), proposer, [prompt], 24, eos)
        assert trace.tokens == reference
        assert sum(committed for _, _, committed in trace.steps) == len(reference) - 1
        if spoil == 0.0:
            assert len(trace.steps) == -(-(len(reference) - 1) // size)
        if spoil == 1.0:
            assert len(trace.steps) == len(reference) - 1


@pytest.mark.parametrize("seed", range(4))
def test_output_is_greedy_with_random_drafters_and_lookup(tiny_target: FrozenTarget, seed: int) -> None:
    prompts, eos = some_prompts(), [9]
    references = greedy(tiny_target, prompts, 24, eos)
    drafter = tiny_drafter(seed, sliding_window=5, full_attention_layers=(1,)) if seed % 2 else tiny_drafter(seed)
    for prompt, reference in zip(prompts, references, strict=True):
        proposers: list[Proposer] = [DFlashProposer(drafter, tiny_target), LookupProposer(3, 3)]
        for proposer in proposers:
            (trace,) = decode(open_session(tiny_target), proposer, [prompt], 24, eos)
            assert trace.tokens == reference


def test_a_batch_decodes_as_its_rows_do_alone() -> None:
    target = FrozenTarget(tiny_llama(), TAPS)
    prompts, eos = some_prompts(5), [9]
    references = greedy(target, prompts, 24, eos)
    assert len({len(reference) for reference in references}) > 1, "rows must end at different times"
    proposer = Scripted(prompts, references, 3, 0.3)
    traces = decode(TreeSession(target), proposer, prompts, 24, eos)
    assert [trace.tokens for trace in traces] == references
    drafter = tiny_drafter()
    together = decode(TreeSession(target), DFlashProposer(drafter, target), prompts, 24, eos)
    alone = [decode(TreeSession(target), DFlashProposer(drafter, target), [p], 24, eos)[0] for p in prompts]
    assert together == alone


def test_both_sessions_agree_on_what_they_show_the_drafter() -> None:
    target = FrozenTarget(tiny_llama(), TAPS)
    prompt = some_prompts()[2]
    block = torch.tensor([[1, 2, 3, 4]])
    seen = []
    for session in (TreeSession(target), ReplaySession(target)):
        first, _ = session.prefill([prompt])
        session.verify(block)
        slots = session.commit(torch.tensor([2]))
        again = session.verify(block)
        seen.append((first, slots.taps, slots.positions, slots.valid, again))
    for left, right in zip(*seen, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_a_rejected_token_leaves_no_trace_in_a_recurrent_state() -> None:
    target = FrozenTarget(tiny_hybrid(), TAPS)
    prompt = some_prompts()[2]

    def after(drafts: list[int]) -> torch.Tensor:
        session = ReplaySession(target)
        session.prefill([prompt])
        session.verify(torch.tensor([[1, *drafts]]))
        session.commit(torch.tensor([1]))
        return session.verify(torch.tensor([[2]]))

    torch.testing.assert_close(after([3, 4, 5]), after([60, 61, 62]), rtol=0, atol=1e-5)


def test_a_hybrid_never_decodes_in_a_batch() -> None:
    target = FrozenTarget(tiny_hybrid(), TAPS)
    session = open_session(target)
    assert isinstance(session, ReplaySession)
    with pytest.raises(ValueError, match="one prompt at a time, not 2"):
        session.prefill([[1, 2], [3, 4]])


def test_the_end_inside_a_block_ends_the_answer() -> None:
    target = FrozenTarget(tiny_llama(), TAPS)
    prompt = some_prompts()[1]
    (free,) = greedy(target, [prompt], 24, [VOCABULARY + 1])
    end = next(i for i in range(2, len(free)) if free[i] not in free[:i])
    eos = [free[end]]
    (trace,) = decode(TreeSession(target), Scripted([prompt], [free], 7, 0.0), [prompt], 24, eos)
    assert trace.tokens == free[: end + 1]
    assert sum(committed for _, _, committed in trace.steps) == end
    assert sum(accepted for _, accepted, _ in trace.steps) <= end


def test_the_mask_token_can_be_said() -> None:
    target = FrozenTarget(tiny_llama(), TAPS)
    prompt = some_prompts()[1]
    (reference,) = greedy(target, [prompt], 24, [VOCABULARY + 1])
    drafter = tiny_drafter(mask_token_id=reference[5])
    (trace,) = decode(TreeSession(target), DFlashProposer(drafter, target), [prompt], 24, [VOCABULARY + 1])
    assert trace.tokens == reference


def test_lookup_takes_the_latest_match_of_the_longest_ending() -> None:
    lookup = LookupProposer(2, 3)
    assert lookup.continuation([1, 2, 3, 9, 8, 7, 3, 5, 1, 2, 3]) == [9, 8]
    assert lookup.continuation([7, 1, 4, 5, 1]) == [4, 5]
    assert lookup.continuation([1, 2, 3]) == []
    assert lookup.continuation([4, 4]) == [4]


def test_figures_of_a_known_trace() -> None:
    """Accepts 2, 0 and 3 in three steps."""
    report = pool([Trace(tokens=list(range(9)), steps=[(3, 2, 3), (3, 0, 1), (3, 3, 4)])]).report()
    assert report["accepted_per_step"] == 5 / 3
    assert report["tokens_per_step"] == 8 / 3
    assert report["acceptance_by_slot"] == [2 / 3, 2 / 3, 1 / 3]
    assert (report["prompts"], report["tokens"], report["target_steps"]) == (1, 8, 3)


def test_figures_pool_exactly() -> None:
    traces = [Trace(steps=[(3, i % 4, i % 4 + 1)] * (i + 1)) for i in range(7)]
    whole = pool(traces)
    parts = pool(traces[:3]), pool(traces[3:])
    assert whole.tokens == sum(part.tokens for part in parts)
    assert whole.accepted_at == [sum(pair) for pair in zip(*(part.accepted_at for part in parts), strict=True)]
