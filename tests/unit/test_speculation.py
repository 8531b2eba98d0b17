"""Whatever is proposed, what comes out is the target's own answer."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from foredraft.speculation.acceptance import Trace, pool
from foredraft.speculation.decode import commit, decode
from foredraft.speculation.proposers import DFlashProposer, LookupProposer, Proposer
from foredraft.speculation.recurrent import delta_rule_on_tree
from foredraft.speculation.session import ReplaySession, Session, Slots, TreeSession, open_session
from foredraft.speculation.tree import Block, Tree, best_first, chain
from foredraft.speculation.verdicts import Sampled, probabilities
from foredraft.target.frozen import FrozenTarget
from foredraft.target.generate import Sampling, greedy_answers
from tests.conftest import DENSE, HYBRIDS, TAPS, VOCABULARY, tiny_drafter, tiny_llama


class Careless:
    """What does not mind which rows of a batch are left."""

    def keep(self, rows: list[int]) -> None:
        pass


class Scripted(Careless):
    """Proposes the reference with some drafts spoilt; ``spoil`` is the share."""

    def __init__(self, prompts: list[list[int]], references: list[list[int]], drafts: int, spoil: float):
        self._whole = {tuple(p): p + r for p, r in zip(prompts, references, strict=True)}
        self._drafts, self._spoil = drafts, spoil
        self._generator = torch.Generator().manual_seed(0)

    def observe(self, slots: Slots) -> None:
        pass

    def propose(self, sequences: list[list[int]]) -> list[Tree]:
        return [chain(self._continue(sequence)) for sequence in sequences]

    def _continue(self, sequence: list[int]) -> list[int]:
        whole = next(w for p, w in self._whole.items() if tuple(sequence[: len(p)]) == p)
        drafts = whole[len(sequence) : len(sequence) + self._drafts]
        spoilt = torch.rand(len(drafts), generator=self._generator) < self._spoil
        return [(token + 1) % VOCABULARY if bad else token for token, bad in zip(drafts, spoilt, strict=True)]


def some_prompts(count: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (2 + 3 * i,), generator=generator).tolist() for i in range(count)]


def streams(rows: int) -> list[torch.Generator]:
    """A generator a row."""
    return [torch.Generator().manual_seed(row) for row in range(rows)]


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


TREE = Tree([3, 4, 5, 6, 7], [-1, -1, 0, 1, 3])


@pytest.mark.parametrize("tree", [chain([2, 3, 4]), TREE], ids=["chain", "tree"])
def test_both_sessions_agree_on_logits_states_and_what_they_show_the_drafter(
    tiny_target: FrozenTarget, tree: Tree
) -> None:
    prompt = some_prompts()[2]
    path = [0, 1] if tree is not TREE else [0, 2, 4]
    seen = []
    for session in (TreeSession(tiny_target), ReplaySession(tiny_target)):
        first, _ = session.prefill([prompt])
        logits = session.verify([1], [tree])
        slots = session.commit([path])
        again = session.verify([8], [chain([9, 2])])
        last = session.commit([[0, 1, 2]])
        seen.append((first, logits, slots.taps, slots.positions, again, last.taps, last.positions))
    for left, right in zip(*seen, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next", "olmo_hybrid"])
def test_a_rejected_token_leaves_no_trace_in_a_recurrent_state(kind: str) -> None:
    target = FrozenTarget(HYBRIDS[kind](), TAPS)
    prompt = some_prompts()[2]

    def after(drafts: list[int], session: Session) -> torch.Tensor:
        session.prefill([prompt])
        session.verify([1], [chain(drafts)])
        session.commit([[0]])
        return session.verify([2], [chain([5])])[:, :2]

    clean = after([3, 4, 5], ReplaySession(target))
    for drafts in ([3, 4, 5], [60, 61, 62]):
        torch.testing.assert_close(after(drafts, TreeSession(target)), clean, rtol=0, atol=1e-4)


def test_the_delta_rule_on_a_tree_is_that_of_every_path_token_by_token() -> None:
    generator = torch.Generator().manual_seed(5)
    block = Block.build([0, 0], [TREE, chain([1, 2])], torch.device("cpu"))
    rows, size, groups, heads, key_size, value_size = 2, 6, 2, 4, 8, 12

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    query, key = random(rows, size, groups, key_size), random(rows, size, groups, key_size)
    value, rate = random(rows, size, heads, value_size), 2 * random(rows, size, heads).sigmoid()
    decay = -10 * random(rows, size, heads).sigmoid()  # so strong that what is on no path would overflow
    state = random(rows, heads, key_size, value_size)
    before = state.clone()
    outputs, fed = delta_rule_on_tree(query, key, value, decay, rate, state, block.sees, unit=True)
    assert torch.equal(state, before)
    for row in range(rows):
        for slot in range(size):
            path = block.sees[row, slot].nonzero()[:, 0]
            plain, after = torch_recurrent_gated_delta_rule(
                *(x[row, path][None] for x in (query, key, value)),
                g=decay[row, path][None],
                beta=rate[row, path][None],
                initial_state=state[row][None],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            torch.testing.assert_close(outputs[row, slot], plain[0, -1], rtol=1e-4, atol=1e-5)
            paths = torch.zeros(rows, size, dtype=torch.long)
            paths[row, : len(path)] = path
            kept = torch.zeros(rows, size, dtype=torch.bool)
            kept[row, : len(path)] = True
            factor, keys, news = fed.along(paths, kept)
            moved = state * factor + keys.mT @ news
            torch.testing.assert_close(moved[row], after[0], rtol=1e-4, atol=1e-5)
            assert torch.equal(moved[1 - row], state[1 - row])  # of which nothing is kept


def test_trees_are_laid_out_as_written() -> None:
    block = Block.build([9, 8], [TREE, chain([1])], torch.device("cpu"))
    assert block.tokens.tolist() == [[9, 3, 4, 5, 6, 7], [8, 1, 8, 8, 8, 8]]
    assert block.depths.tolist() == [[0, 1, 1, 2, 2, 3], [0, 1, 1, 1, 1, 1]]
    assert block.sees[0, 5].tolist() == [True, False, True, False, True, True]
    assert block.above[0].tolist() == [[0] * 4, [0, 1, 1, 1], [0, 2, 2, 2], [0, 1, 3, 3], [0, 2, 4, 4], [0, 2, 4, 5]]
    assert block.sees[1].tolist() == [[slot in (0, own) for slot in range(6)] for own in range(6)]
    assert TREE.depth == 3 and TREE.children == [{3: 1, 4: 2}, {5: 3}, {6: 4}, {}, {7: 5}, {}]
    with pytest.raises(ValueError, match="before their children"):
        Tree([1, 2], [1, -1])
    with pytest.raises(ValueError, match="the same token"):
        Tree([1, 1], [-1, -1])


def test_the_best_first_tree_is_that_of_all_paths_sorted() -> None:
    torch.manual_seed(0)
    logprobs, ids = torch.randn(4, 5).log_softmax(-1).sort(-1, descending=True)
    paths = [list(p) for depth in (1, 2, 3, 4) for p in itertools.product(range(5), repeat=depth)]
    worth = {tuple(p): sum(float(logprobs[d, r]) for d, r in enumerate(p)) for p in paths}
    likeliest = sorted(worth, key=lambda p: -worth[p])
    for budget in (1, 3, 17, 60):
        tree = best_first(logprobs, ids, budget)
        found = set()
        for node in range(len(tree)):
            path = [node]
            while tree.parents[path[0]] >= 0:
                path.insert(0, tree.parents[path[0]])
            found.add(tuple(ids[d].tolist().index(tree.tokens[n]) for d, n in enumerate(path)))
        assert found == set(likeliest[:budget])
    assert best_first(logprobs[:, :1], ids[:, :1], 9) == chain(ids[:, 0].tolist())


def test_attention_is_not_planned_anew_for_every_length() -> None:
    target, seen = FrozenTarget(tiny_llama(), TAPS), []
    target.blocks[0].register_forward_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    decode(TreeSession(target), LookupProposer(3, 3), some_prompts(1), 6, [VOCABULARY + 1])
    greedy(target, some_prompts(1), 6, [VOCABULARY + 1])
    assert before and set(seen) == {False} and torch.backends.cuda.cudnn_sdp_enabled()


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
    traces = [Trace([0] * (1 + (i + 1) * (i % 4 + 1)), [(3, i % 4, i % 4 + 1)] * (i + 1)) for i in range(7)]
    whole = pool(traces)
    parts = pool(traces[:3]), pool(traces[3:])
    assert whole.tokens == sum(part.tokens for part in parts)
    assert whole.accepts == parts[0].accepts + parts[1].accepts and whole.rooms == parts[0].rooms + parts[1].rooms


@pytest.mark.parametrize("limit", [6, 40])
def test_acceptance_by_slot_does_not_depend_on_where_answers_end(limit: int) -> None:
    """Each draft is right by a coin of its own: the first k by its k-th power, however soon the answer is cut."""
    coin, tree, generator = 0.8, chain(list(range(7))), torch.Generator().manual_seed(0)
    traces = []
    for _ in range(60_000 // limit):
        trace = Trace([0])
        while len(trace.tokens) < limit:
            wrong = (torch.rand(7, generator=generator) >= coin).nonzero()
            right = int(wrong[0, 0]) if len(wrong) else 7
            commit(trace, tree, [1] * (right + 1), limit, [])
        traces.append(trace)
    found = pool(traces).report()["acceptance_by_slot"]
    assert found[:5] == pytest.approx([coin**k for k in range(1, 6)], abs=0.02)
    assert len(found) == 7 and found == sorted(found, reverse=True)


def test_what_was_not_drafted_was_not_accepted() -> None:
    trace = Trace([0] * 9, [(2, 2, 3), (0, 0, 1), (0, 0, 1), (2, 0, 1), (0, 0, 1), (0, 0, 1)])
    assert pool([trace]).report()["acceptance_by_slot"] == [1 / 6, 1 / 5]


class Guesses(Careless):
    """Random trees, in part right: of the reference, of other tokens, as wide and deep as it happens."""

    def __init__(self, whole: list[int], size: int, generator: torch.Generator):
        self._whole, self._size, self._generator = whole, size, generator

    def observe(self, slots: Slots) -> None:
        pass

    def propose(self, sequences: list[list[int]]) -> list[Tree]:
        right = self._whole[len(sequences[0]) :]
        branches: dict[tuple[int, int], None] = {}
        depths = [0]
        for node in range(self._size - 1):
            parent = int(torch.randint(-1, node, (), generator=self._generator)) if node else -1
            depth, coin = depths[parent + 1], float(torch.rand((), generator=self._generator))
            token = right[depth] if coin < 0.6 and depth < len(right) else int(coin * 1e6) % VOCABULARY
            if (parent, token) in branches:
                break
            branches[parent, token] = None
            depths.append(depth + 1)
        return [Tree([token for _, token in branches], [parent for parent, _ in branches])]


@pytest.mark.parametrize("kind", ["llama", *HYBRIDS])
def test_200_random_cases_are_greedy_token_for_token(kind: str) -> None:
    """Fifty of each kind of target: prompts of 1 to 12 tokens, 2 to 16 slots, chains and trees, drafters and guesses."""
    target = FrozenTarget(tiny_llama() if kind == "llama" else HYBRIDS[kind](), TAPS)
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in (1, 2, 3, 7, 12)]
    eos = [9]
    references = greedy(target, prompts, 20, eos)
    for case in range(50):
        prompt, reference = prompts[case % 5], references[case % 5]
        size = 2 + int(torch.randint(15, (), generator=generator))
        window = {"sliding_window": 4, "full_attention_layers": (1,)} if case % 3 == 0 else {}
        drafter = tiny_drafter(case, block_size=size, **window)
        make: Callable[[], Proposer] = [
            partial(Guesses, prompt + reference, size, generator),
            partial(DFlashProposer, drafter, target),
            partial(DFlashProposer, drafter, target, budget=size),
            partial(LookupProposer, size - 1, 3),
        ][case % 4]
        session = TreeSession(target)
        (trace,) = decode(session, make(), [prompt], 20, eos)
        assert trace.tokens == reference, f"case {case}"
        assert session.passes == 1 + len(trace.steps)
        if case < 8:
            (trace,) = decode(ReplaySession(target), make(), [prompt], 20, eos)
            assert trace.tokens == reference, f"case {case}, replayed"


@pytest.mark.parametrize("kind", ["llama", *HYBRIDS])
def test_rows_of_a_batch_decode_as_they_do_alone_by_chains_and_trees(kind: str) -> None:
    target = FrozenTarget(tiny_llama() if kind == "llama" else HYBRIDS[kind](), TAPS)
    prompts, eos, drafter = some_prompts(4), [9], tiny_drafter(3)
    references = greedy(target, prompts, 16, eos)
    for budget in (None, 6):
        together = decode(TreeSession(target), DFlashProposer(drafter, target, budget=budget), prompts, 16, eos)
        assert [trace.tokens for trace in together] == references
        for prompt, trace in zip(prompts, together, strict=True):
            alone = decode(TreeSession(target), DFlashProposer(drafter, target, budget=budget), [prompt], 16, eos)
            assert alone == [trace]


@pytest.mark.parametrize("kind", ["windows", "short convolutions"])
def test_targets_with_other_layers_are_replayed(kind: str) -> None:
    torch.manual_seed(0)
    model = (
        MistralForCausalLM(MistralConfig(**DENSE | {"initializer_range": 0.5, "sliding_window": 4}))
        if kind == "windows"
        else Lfm2ForCausalLM(Lfm2Config(**DENSE | {"initializer_range": 0.5, "full_attn_idxs": [1, 3]}))
    )
    target = FrozenTarget(model, TAPS)
    session = open_session(target)
    assert isinstance(session, ReplaySession)
    with pytest.raises(ValueError, match="one prompt at a time, not 2"):
        session.prefill([[1, 2], [3, 4]])
    (prompt,), eos = some_prompts()[2:], [VOCABULARY + 1]
    (reference,) = greedy(target, [prompt], 16, eos)
    for proposer in (Scripted([prompt], [reference], 3, 0.4), DFlashProposer(tiny_drafter(1), target, budget=5)):
        (trace,) = decode(open_session(target), proposer, [prompt], 16, eos)
        assert trace.tokens == reference


def test_a_tree_of_width_one_is_the_chain(tiny_target: FrozenTarget) -> None:
    prompt, drafter = some_prompts()[2], tiny_drafter(2)
    proposer = DFlashProposer(drafter, tiny_target)
    _, slots = TreeSession(tiny_target).prefill([prompt])
    proposer.observe(slots)
    logits = proposer.logits([[*prompt, 3]])
    logprobs, ids = logits[0].log_softmax(-1).topk(1)
    assert [best_first(logprobs, ids, 3)] == proposer.trees(logits)


class Markov(Careless):
    """A target that knows the last token alone: what follows is a row of a table."""

    passes = fed = 0

    def __init__(self, table: torch.Tensor):
        self._table = table

    def prefill(self, prompts: list[list[int]]) -> tuple[torch.Tensor, Slots]:
        return self._table[[prompt[-1] for prompt in prompts]], Slots(*torch.zeros(3, len(prompts), 1))

    def verify(self, roots: list[int], trees: list[Tree]) -> torch.Tensor:
        return self._table[Block.build(roots, trees, torch.device("cpu")).tokens]

    def commit(self, paths: list[list[int]]) -> Slots:
        return Slots(*torch.zeros(3, len(paths), 1))


class MarkovDrafter(Careless):
    """Guesses by another table, slot after slot from the last token alone: drawn, or a tree of the likeliest."""

    def __init__(self, table: torch.Tensor, kind: str):
        self._odds, self._kind = table.softmax(-1), kind
        self._generator = torch.Generator().manual_seed(5)

    def observe(self, slots: Slots) -> None:
        pass

    def propose(self, sequences: list[list[int]]) -> list[Tree]:
        odds = self._odds[[sequence[-1] for sequence in sequences]]
        if self._kind == "tree":
            logprobs, ids = odds.log().topk(4)
            return [
                best_first(row[None].repeat(3, 1), own[None].repeat(3, 1), 9)
                for row, own in zip(logprobs, ids, strict=True)
            ]
        if self._kind == "chain":
            return [chain([token] * 3) for token in odds.argmax(-1).tolist()]
        drawn = odds.multinomial(3, replacement=True, generator=self._generator)
        return [chain(tokens, own.repeat(3, 1)) for tokens, own in zip(drawn.tolist(), odds, strict=True)]


@pytest.mark.parametrize("kind", ["chain", "drawn", "tree"])
def test_sampled_tokens_follow_the_target_whatever_is_drafted(kind: str) -> None:
    """Chi-square over 200,000 committed tokens of a target of 50, by what stands before each."""
    generator = torch.Generator().manual_seed(1)
    table, guessed = torch.randn(50, 50, generator=generator), torch.randn(50, 50, generator=generator)
    rows, tokens = 100, 2000
    sampling = Sampling(temperature=0.8)
    prompts = [[row % 50] for row in range(rows)]
    drafter = MarkovDrafter(0.5 * table + guessed, kind)
    traces = decode(Markov(table), drafter, prompts, tokens, [], Sampled(sampling, streams(rows)))
    counts = torch.zeros(50, 50)
    for prompt, trace in zip(prompts, traces, strict=True):
        said = torch.tensor(prompt + trace.tokens)
        counts.index_put_((said[:-1], said[1:]), torch.ones(len(said) - 1), accumulate=True)
    assert counts.sum() == rows * tokens
    expected = counts.sum(1, keepdim=True) * probabilities(table, sampling)
    statistic, freedom = float(((counts - expected).square() / expected).sum()), 50 * 49
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5
    assert pool(traces).report()["accepted_per_step"] > 0.05


@pytest.mark.parametrize("few", [1024, 3])
def test_distributions_are_those_of_transformers(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.speculation.verdicts.FEW", few)
    torch.manual_seed(0)
    logits = torch.randn(6, 200) * 3
    for sampling in (
        Sampling(0.7),
        Sampling(1.3, top_k=20),
        Sampling(1.0, top_p=0.8),
        Sampling(0.6, top_k=30, top_p=0.9),
    ):
        warped = TemperatureLogitsWarper(sampling.temperature)(None, logits)
        if sampling.top_k:
            warped = TopKLogitsWarper(sampling.top_k)(None, warped)
        if sampling.top_p < 1:
            warped = TopPLogitsWarper(sampling.top_p)(None, warped)
        torch.testing.assert_close(probabilities(logits, sampling), warped.softmax(-1))


def test_what_a_row_draws_depends_on_no_other_row() -> None:
    target = FrozenTarget(tiny_llama(), TAPS)
    prompts, drafter, sampling = some_prompts(4), tiny_drafter(3), Sampling(1.0, top_p=0.95)

    def sampled(rows: list[int]) -> list[Trace]:
        own = [streams(4)[row] for row in rows]
        proposer = DFlashProposer(drafter, target, drawn=sampling, generators=own)
        return decode(TreeSession(target), proposer, [prompts[row] for row in rows], 16, [9], Sampled(sampling, own))

    together = sampled([0, 1, 2, 3])
    assert [trace for row in (3, 0) for trace in sampled([row])] == [together[3], together[0]]
    assert len({tuple(trace.tokens) for trace in together}) == 4
