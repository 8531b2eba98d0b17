"""Blocks, masks and weights against the slow and obvious."""

import pytest
import torch

from foredraft.drafter import float8, loss
from foredraft.drafter.attention import (
    Attention,
    DocumentAttention,
    KeysValues,
    MaskedAttention,
    block_mask,
    decoding_mask,
    dense_mask,
    readable,
)
from foredraft.drafter.blocks import (
    Blocks,
    anchor_budgets,
    anchor_candidates,
    block_inputs,
    build_blocks,
    draw_anchors,
    leading_run,
)
from foredraft.drafter.float8 import Float8Head
from foredraft.drafter.loss import Answers, Terms, chunk_losses, dpace_weights, equal_blocks, slot_losses
from tests.conftest import TAPS, tiny_drafter

SIZE = 4


def mask_of(text: str) -> torch.Tensor:
    return torch.tensor([letter == "#" for letter in text])


def test_anchors_are_supervised_and_followed_by_supervision() -> None:
    candidates = anchor_candidates(mask_of("..##.#.###"))
    assert draw_anchors(candidates, 100, torch.Generator().manual_seed(0)).tolist() == [2, 7, 8]
    assert len(anchor_candidates(mask_of("....#"))) == len(anchor_candidates(mask_of("....."))) == 0


def test_anchors_are_drawn_without_replacement() -> None:
    found = draw_anchors(torch.arange(50), 20, torch.Generator().manual_seed(0))
    assert len(found.unique()) == 20 and found.tolist() == sorted(found.tolist())


@pytest.mark.parametrize(
    ("supervised", "candidates", "total", "expected"),
    [
        ([100, 300, 100], [99, 299, 99], 40, [8, 24, 8]),
        ([100, 300, 1], [99, 299, 0], 40, [10, 30, 0]),  # nobody gets more than it has
        ([100, 10], [99, 9], 104, [95, 9]),  # and what it cannot take goes to the others
        ([5, 4, 3], [4, 3, 2], 2, [1, 1, 0]),
        ([5, 4], [4, 3], 100, [4, 3]),
        ([0], [0], 10, [0]),
    ],
)
def test_budgets_follow_supervised_tokens_and_are_used_up(
    supervised: list[int], candidates: list[int], total: int, expected: list[int]
) -> None:
    assert anchor_budgets(supervised, candidates, total) == expected


def test_slot_k_is_asked_for_token_a_plus_k_and_only_inside_the_span() -> None:
    blocks = build_blocks([torch.tensor([4, 6])], [mask_of("....#####.")], SIZE)
    assert blocks.positions.tolist() == [[4, 5, 6, 7], [6, 7, 8, 9]]
    assert blocks.counted.tolist() == [[False, True, True, True], [False, True, True, False]]
    anchors, mask = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([9.0, 8.0])
    inputs = block_inputs(anchors, mask, SIZE)
    assert inputs.shape == (2, SIZE, 2) and torch.equal(inputs[:, 0], anchors) and bool((inputs[:, 1:] == mask).all())


def test_a_block_is_cut_at_the_document_end_and_at_a_gap() -> None:
    masks = [mask_of("..##.###"), mask_of("..###")]  # a row of two documents, in which more documents may follow
    blocks = build_blocks([torch.tensor([2, 5]), torch.tensor([2])], masks, SIZE, count=4)
    assert blocks.counted.tolist() == [
        [False, True, False, False],
        [False, True, True, False],
        [False, True, True, False],
        [False] * 4,
    ]
    assert blocks.starts.tolist() == [0, 0, 8, 0] and blocks.exists.tolist() == [True, True, True, False]


def test_accepted_runs_pool_to_the_same_mean_however_grouped() -> None:
    counted = torch.tensor([[False, True, True, True]] * 4)
    correct = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1]]).bool()
    assert leading_run(correct, counted).tolist() == [3, 2, 1, 0]
    halves = [leading_run(correct[rows], counted[rows]).sum() for rows in ([0, 2], [1, 3])]
    assert sum(halves) / 4 == 1.5


def row_of_documents(lengths: list[int], anchors: list[list[int]], empty: int = 0) -> tuple[Blocks, list[int]]:
    masks = [torch.ones(length, dtype=torch.bool) for length in lengths]
    count = sum(map(len, anchors)) + empty
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return build_blocks([torch.tensor(a, dtype=torch.long) for a in anchors], masks, SIZE, count), bounds


@pytest.mark.parametrize("window", [None, 3, 6])
def test_both_masks_of_training_equal_nested_loops(window: int | None) -> None:
    lengths, anchors = [12, 7], [[4, 5, 9], [2]]
    blocks, bounds = row_of_documents(lengths, anchors)
    total = bounds[-1] + blocks.counted.numel()
    numbers = torch.arange(blocks.counted.numel())[:, None], torch.arange(total)[None]
    zero = torch.tensor(0)
    row_mask = readable(blocks, bounds[-1], window)(zero, zero, *numbers)
    where = [(document, anchor) for document, found in enumerate(anchors) for anchor in found]
    for n, (document, anchor) in enumerate(where):
        for s in range(SIZE):
            for key in range(total):
                token, other = key - bounds[document], key - bounds[-1]
                if key < bounds[-1]:
                    seen = 0 <= token < anchor and (window is None or anchor + s - token < window)
                else:
                    r = other % SIZE
                    seen = other // SIZE == n and (window is None or (r <= s and s - r < window))
                assert row_mask[n * SIZE + s, key] == seen
    first = dense_mask(torch.tensor(anchors[0]), SIZE, lengths[0], window)[0, 0]
    own = slice(bounds[-1], bounds[-1] + 3 * SIZE)
    assert torch.equal(first, torch.cat([row_mask[: 3 * SIZE, : lengths[0]], row_mask[: 3 * SIZE, own]], 1))


@pytest.mark.parametrize("window", [None, 6])
def test_attention_by_document_equals_attention_of_the_whole_row(window: int | None) -> None:
    blocks, bounds = row_of_documents([12, 5, 30], [[4, 5, 9], [], [2, 28]], empty=2)
    torch.manual_seed(0)
    queries = blocks.counted.numel()
    q = torch.randn(1, 4, queries, 8, requires_grad=True)
    context, own = (KeysValues(*torch.randn(2, 1, 2, n, 8)) for n in (bounds[-1], queries))
    numbers = torch.arange(queries)[:, None], torch.arange(bounds[-1] + queries)[None]
    mask = readable(blocks, bounds[-1], window)(torch.tensor(0), torch.tensor(0), *numbers)
    whole = MaskedAttention(mask[None, None])(q, context, own)
    parts = DocumentAttention(blocks, bounds, window)(q, context, own)
    real = slice(0, 5 * SIZE)
    torch.testing.assert_close(parts[:, :, real], whole[:, :, real])
    assert bool((parts[:, :, 5 * SIZE :] == 0).all())
    gradients = [torch.autograd.grad(out[:, :, real].square().sum(), q)[0] for out in (parts, whole)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("size", [16, 10])
def test_the_tiles_of_a_row_are_those_of_the_rule(window: int | None, size: int) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    torch.manual_seed(0)
    lengths = [130, 300, 9, 700]
    masks = [torch.ones(length, dtype=torch.bool) for length in lengths]
    anchors = [torch.randperm(n - 1)[:count].sort().values for n, count in zip(lengths, (6, 9, 1, 40), strict=True)]
    blocks = build_blocks(anchors, masks, size, count=59)
    length, queries = 1152, 59 * size
    mine = block_mask(blocks, length, window)
    asked = create_block_mask(
        readable(blocks, length, window), None, None, queries, length + queries, device="cpu", BLOCK_SIZE=128
    )
    assert mine.seq_lengths == asked.seq_lengths

    def tiles(numbers: torch.Tensor, indices: torch.Tensor) -> list[set[int]]:
        return [set(row[:count].tolist()) for count, row in zip(numbers[0, 0].tolist(), indices[0, 0], strict=True)]

    full = tiles(asked.full_kv_num_blocks, asked.full_kv_indices)
    assert tiles(mine.full_kv_num_blocks, mine.full_kv_indices) == full
    assert tiles(mine.kv_num_blocks, mine.kv_indices) == tiles(asked.kv_num_blocks, asked.kv_indices)
    assert any(full) == (window is None)


@pytest.mark.parametrize("window", [None, 3, 6])
def test_the_decoding_mask_is_the_training_mask_of_its_block(window: int | None) -> None:
    length, anchor = 10, 7
    expected = dense_mask(torch.tensor([anchor]), SIZE, length, window)
    # The same tokens, cached out of order and with rejected ones between them.
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 3, 4, 6, 7, 8, 9]])
    valid = torch.tensor([[1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0]]).bool()
    positions[0, 3:6] = torch.tensor([3, 4, 5])
    positions[0, 6:9] = torch.tensor([3, 4, 5])
    positions = torch.cat([positions, torch.tensor([[6]])], dim=1)
    valid = torch.cat([valid, torch.tensor([[True]])], dim=1)
    mask = decoding_mask(torch.tensor([anchor]), SIZE, positions, valid, window)[0, 0]
    for s in range(SIZE):
        seen = {int(positions[0, i]) for i in range(13) if mask[s, i]}
        assert seen == {t for t in range(length) if expected[0, 0, s, t]}
        assert mask[s, 13:].tolist() == expected[0, 0, s, length:].tolist()


def attention_of(blocks: Blocks, bounds: list[int]) -> dict[str, Attention]:
    return {
        "full_attention": DocumentAttention(blocks, bounds, None),
        "sliding_attention": DocumentAttention(blocks, bounds, 6),
    }


@pytest.mark.parametrize("sliding", [False, True])
def test_no_gradient_from_features_at_or_after_an_anchor_nor_from_other_documents(sliding: bool) -> None:
    """However the blocks overlap, block a's outputs depend on its own document's features strictly before a."""
    changes = {"sliding_window": 6, "full_attention_layers": (1,)} if sliding else {}
    drafter = tiny_drafter(**changes)
    anchors = [[3, 5], [4, 6, 8]]
    blocks, bounds = row_of_documents([9, 16], anchors)
    features = torch.randn(1, bounds[-1], len(TAPS), 16, requires_grad=True)
    positions = torch.cat([torch.arange(9), torch.arange(16)])
    context = drafter.read_context(features, positions[None])
    embeddings = torch.randn(1, blocks.counted.numel(), 16)
    hidden = drafter.fill(embeddings, blocks.positions.flatten()[None], context, attention_of(blocks, bounds))
    where = [(bounds[document], anchor) for document, found in enumerate(anchors) for anchor in found]
    for n, (start, anchor) in enumerate(where):
        (gradient,) = torch.autograd.grad(hidden[0, n * SIZE : (n + 1) * SIZE].sum(), features, retain_graph=True)
        by_token = gradient[0].abs().sum((1, 2))
        assert bool((by_token[:start] == 0).all()) and bool((by_token[start + anchor :] == 0).all())
        assert bool((by_token[start + max(0, anchor - 3) : start + anchor] > 0).all())


@pytest.mark.filterwarnings("ignore")  # of PyTorch's own, in tracing
def test_compiled_layers_give_the_same_and_keep_less_for_the_backward_pass() -> None:
    """As a GPU has them but for the code generator: traced, and split into forward and backward."""
    torch.manual_seed(0)
    blocks, bounds = row_of_documents([9, 16], [[3, 5], [4, 6, 8]])
    features, embeddings = torch.randn(1, bounds[-1], len(TAPS), 16), torch.randn(1, blocks.counted.numel(), 16)
    positions = torch.cat([torch.arange(9), torch.arange(16)])[None]
    found = []
    for compiled in (False, True):
        drafter, kept = tiny_drafter(ffn_size=160).requires_grad_(), {}
        if compiled:
            drafter.compile_layers(backend="aot_eager_decomp_partition")

        def keep(tensor: torch.Tensor, kept: dict[int, torch.Tensor] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        places, attention = blocks.positions.flatten()[None], attention_of(blocks, bounds)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = drafter(features, positions, embeddings, places, attention)
        hidden.square().sum().backward()
        own = {parameter.data_ptr() for parameter in drafter.parameters()}
        wide = sum(tensor.shape[-1] == 160 for place, tensor in kept.items() if place not in own)
        found.append((hidden, [parameter.grad for parameter in drafter.parameters()], wide))
    (plain, gradients, many), (traced, traced_gradients, few) = found
    torch.testing.assert_close(traced, plain)
    torch.testing.assert_close(traced_gradients, gradients, rtol=1e-4, atol=1e-4)
    assert many > 0 and few == 0, "of the feed-forward's width nothing is kept but gate and up together"


def test_a_block_among_others_equals_the_block_alone_and_as_decoded() -> None:
    drafter = tiny_drafter(sliding_window=6, full_attention_layers=(1,))
    torch.manual_seed(1)
    length, anchors = 16, [4, 6, 11]
    features, embeddings = torch.randn(1, length, len(TAPS), 16), torch.randn(1, len(anchors), SIZE, 16)

    def run(chosen: list[int]) -> torch.Tensor:
        blocks, bounds = row_of_documents([length], [[anchors[i] for i in chosen]])
        context = drafter.read_context(features, torch.arange(length)[None])
        inputs = embeddings[:, chosen].flatten(1, 2)
        return drafter.fill(inputs, blocks.positions.flatten()[None], context, attention_of(blocks, bounds))

    together = run([0, 1, 2]).unflatten(1, (3, SIZE))
    for n, anchor in enumerate(anchors):
        torch.testing.assert_close(run([n])[0], together[0, n])
        seen = torch.arange(anchor)[None]
        context = drafter.read_context(features[:, :anchor], seen)
        attention = {}
        for kind, window in {"full_attention": None, "sliding_attention": 6}.items():
            mask = decoding_mask(torch.tensor([anchor]), SIZE, seen, torch.ones_like(seen).bool(), window)
            attention[kind] = MaskedAttention(mask)
        decoded = drafter.fill(embeddings[:, n], (anchor + torch.arange(SIZE))[None], context, attention)
        torch.testing.assert_close(decoded[0], together[0, n])


def test_dpace_weights_equal_nested_loops() -> None:
    torch.manual_seed(0)
    confidence, alpha = torch.rand(3, 5), 0.3
    counted = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()
    weights = dpace_weights(confidence, counted, alpha)
    for n in range(3):
        for k in range(5):
            expected = 0.0
            for j in range(k, 5):
                product = 1.0
                for i in range(1, j + 1):
                    product *= (1 - alpha) * float(confidence[n, i]) + alpha if counted[n, i] else 1.0
                expected += product if counted[n, j] else 0.0
            assert weights[n, k] == pytest.approx(expected if counted[n, k] else 0.0, rel=1e-5)


def test_equal_blocks_weigh_the_same_and_empty_ones_nothing() -> None:
    weights = equal_blocks(torch.tensor([[0.0, 3.0, 1.0], [0.0, 0.1, 0.0], [0.0, 0.0, 0.0]]))
    assert weights.tolist() == [[0.0, 0.75, 0.25], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


def some_answers(slots: int, rows: int, known: int) -> Answers:
    """Answers whose ids are distinct in each slot, some of them lacked by the head."""
    ids = torch.stack([torch.randperm(rows)[:known] for _ in range(slots)])
    ids[torch.rand(slots, known) < 0.2] = -1
    logprobs = torch.randn(slots, rows).log_softmax(-1)[:, :known]
    return Answers(torch.randint(rows, (slots,)), ids, logprobs)


def obvious_losses(logits: torch.Tensor, answers: Answers, terms: Terms) -> torch.Tensor:
    """Over the known ids and one bucket for all others, slot by slot."""
    total = []
    for z, label, ids, logprobs in zip(logits, answers.labels, answers.topk_ids, answers.topk_logprobs, strict=True):
        q = z.softmax(-1)
        known = ids >= 0
        guess, target = q[ids[known]], logprobs[known].exp()
        guess, target = (torch.cat([x, 1 - x.sum()[None]]) for x in (guess, target))
        kl = (target * (target.log() - guess.log())).sum()
        tv = 0.5 * (target - guess).abs().sum()
        total.append(-terms.ce * q[label].log() + terms.kl * kl + terms.tv * tv)
    return torch.stack(total)


@pytest.mark.parametrize("terms", [Terms(1, 0, 0), Terms(0, 1, 0), Terms(0, 0, 1), Terms(0.4, 0.5, 0.3)])
def test_losses_and_their_written_gradients_equal_autograds(terms: Terms) -> None:
    torch.manual_seed(0)
    logits = torch.randn(12, 20, dtype=torch.float64, requires_grad=True)
    answers = some_answers(12, 20, 5)
    expected = obvious_losses(logits, answers, terms)
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    found = logits.detach().float()
    losses = chunk_losses(found, answers, terms, gradient=True)
    torch.testing.assert_close(losses.loss, expected.float())
    torch.testing.assert_close(found, gradient.float(), rtol=1e-4, atol=1e-6)
    assert torch.equal(losses.guess, logits.argmax(-1))
    torch.testing.assert_close(losses.ce, -logits.log_softmax(-1).gather(1, answers.labels[:, None])[:, 0].float())


def test_a_head_in_float8_gives_nearly_the_same_losses_and_gradients() -> None:
    torch.manual_seed(2)
    hidden, head = torch.randn(40, 64), torch.randn(512, 64) * 0.3
    answers = Answers(
        torch.randint(512, (40,)), torch.rand(40, 512).topk(4).indices, torch.randn(40, 9).log_softmax(-1)[:, :4]
    )
    found = []
    for rows in (head, Float8Head(head)):
        states = hidden.bfloat16().requires_grad_()
        losses = slot_losses(
            states, rows if isinstance(rows, Float8Head) else rows.bfloat16(), answers, Terms(1.0, 0.3, 0.2)
        )
        losses.loss.sum().backward()
        found.append((losses.loss.detach(), states.grad.float()))  # type: ignore[union-attr]
    (exact, gradient), (rounded, rounded_gradient) = found
    assert 0 < float((rounded - exact).norm() / exact.norm()) < 0.02
    assert 0 < float((rounded_gradient - gradient).norm() / gradient.norm()) < 0.1
    with pytest.raises(ValueError, match=r"multiples of 16, not \(500, 64\)"):
        Float8Head(head[:500])


def test_a_layer_in_float8_gives_nearly_the_same_outputs_and_gradients() -> None:
    torch.manual_seed(3)
    x, weight, pull = torch.randn(2, 24, 64) * 30, torch.randn(112, 64) * 0.02, torch.randn(2, 24, 112) * 1e-6
    found = []
    for product in (torch.nn.functional.linear, float8.linear):
        leaves = [x.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()]
        out = product(*leaves)
        out.backward(pull.bfloat16())
        found.append([out.detach().float(), *(leaf.grad.float() for leaf in leaves)])  # type: ignore[union-attr]
    for exact, rounded in zip(*found, strict=True):
        assert 0 < float((rounded - exact).norm() / exact.norm()) < 0.08


def test_float8_is_for_training_alone_and_for_sizes_that_have_it() -> None:
    drafter = tiny_drafter()
    part, x = drafter.layers[0].mlp, torch.randn(1, 32, drafter.shape.hidden_size)
    expected = part(x).detach()
    drafter.train_in_float8()
    with torch.no_grad():
        assert torch.equal(part(x), expected)
    assert not torch.equal(part(x), expected)
    with pytest.raises(ValueError, match="multiples of 16: not 40"):
        tiny_drafter(ffn_size=40).train_in_float8()


def test_a_tail_without_mass_is_finite() -> None:
    logits = torch.zeros(2, 4)
    logits[0, :2] = 60.0  # all of the guess's mass on what is known
    answers = Answers(
        torch.tensor([0, 1]), torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    )
    losses = chunk_losses(logits, answers, Terms(1, 1, 1), gradient=True)
    assert bool(losses.loss.isfinite().all()) and bool(logits.isfinite().all())


def test_chunked_losses_equal_whole_ones_with_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(10, 6, requires_grad=True), torch.randn(20, 6)
    answers, terms, weights = some_answers(10, 20, 3), Terms(0.4, 0.6, 0.1), torch.rand(10)
    expected = obvious_losses(hidden @ head.T, answers, terms)
    (gradient,) = torch.autograd.grad((weights * expected).sum(), hidden)
    for size in (1024, 3):
        monkeypatch.setattr(loss, "CHUNK", size)
        losses = slot_losses(hidden, head, answers, terms)
        torch.testing.assert_close(losses.loss, expected)
        torch.testing.assert_close(torch.autograd.grad((weights * losses.loss).sum(), hidden)[0], gradient)
    with torch.no_grad():
        assert torch.equal(slot_losses(hidden, head, answers, terms).loss, losses.loss)
