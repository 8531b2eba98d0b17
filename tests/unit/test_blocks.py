"""Blocks, masks and weights against the slow and obvious."""

import pytest
import torch

from foredraft.drafter.blocks import anchor_budgets, block_inputs, build_blocks, draw_anchors, leading_run
from foredraft.drafter.loss import dpace_weights, kl_with_tail, slot_losses
from foredraft.drafter.masks import decoding_mask, training_mask
from tests.conftest import TAPS, tiny_drafter

SIZE = 4


def mask_of(text: str) -> torch.Tensor:
    return torch.tensor([letter == "#" for letter in text])


def test_anchors_are_supervised_and_followed_by_supervision() -> None:
    found = draw_anchors(mask_of("..##.#.###"), 100, torch.Generator().manual_seed(0))
    assert found.tolist() == [2, 7, 8]


def test_anchors_are_drawn_without_replacement() -> None:
    found = draw_anchors(mask_of("#" * 50), 20, torch.Generator().manual_seed(0))
    assert len(found.unique()) == 20


def test_budgets_follow_supervised_tokens_and_starve_nobody() -> None:
    assert anchor_budgets([100, 300, 1], 40) == [9, 29, 1]


def test_slot_k_is_asked_for_token_a_plus_k_and_only_inside_the_span() -> None:
    ids = torch.arange(10, 20)[None]
    loss_mask = mask_of("....#####.")[None]
    blocks = build_blocks([torch.tensor([4, 6])], loss_mask, SIZE)
    assert blocks.positions.tolist() == [[[4, 5, 6, 7], [6, 7, 8, 9]]]
    assert blocks.counted.tolist() == [[[False, True, True, True], [False, True, True, False]]]
    assert block_inputs(blocks, ids, 5).tolist() == [[[14, 5, 5, 5], [16, 5, 5, 5]]]


def test_a_block_is_cut_at_the_document_end_and_at_a_gap() -> None:
    loss_mask = torch.stack([mask_of("..##.###"), mask_of("..###...")])  # the second document is padded from 5 on
    blocks = build_blocks([torch.tensor([2, 5]), torch.tensor([2])], loss_mask, SIZE)
    assert blocks.counted.tolist() == [
        [[False, True, False, False], [False, True, True, False]],
        [[False, True, True, False], [False] * 4],
    ]


def test_accepted_runs_pool_to_the_same_mean_however_grouped() -> None:
    counted = torch.tensor([[False, True, True, True]] * 4)
    correct = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1]]).bool()
    assert leading_run(correct, counted).tolist() == [3, 2, 1, 0]
    halves = [leading_run(correct[rows], counted[rows]).sum() for rows in ([0, 2], [1, 3])]
    assert sum(halves) / 4 == 1.5


@pytest.mark.parametrize("window", [None, 3, 6])
def test_the_training_mask_equals_nested_loops(window: int | None) -> None:
    length, anchors = 12, [4, 5, 9]
    blocks = build_blocks([torch.tensor(anchors)], torch.ones(1, length, dtype=torch.bool), SIZE)
    mask = training_mask(blocks, length, window)[0, 0]
    assert mask.shape == (len(anchors) * SIZE, length + len(anchors) * SIZE)
    for n, anchor in enumerate(anchors):
        for s in range(SIZE):
            row = mask[n * SIZE + s]
            for t in range(length):
                assert row[t] == (t < anchor and (window is None or anchor + s - t < window))
            for m in range(len(anchors)):
                for r in range(SIZE):
                    seen = m == n and (window is None or (r <= s and s - r < window))
                    assert row[length + m * SIZE + r] == seen


@pytest.mark.parametrize("window", [None, 3, 6])
def test_the_decoding_mask_is_the_training_mask_of_its_block(window: int | None) -> None:
    length, anchor = 10, 7
    blocks = build_blocks([torch.tensor([anchor])], torch.ones(1, length, dtype=torch.bool), SIZE)
    expected = training_mask(blocks, length, window)
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


@pytest.mark.parametrize("sliding", [False, True])
def test_no_gradient_from_features_at_or_after_an_anchor(sliding: bool) -> None:
    """However the blocks overlap, block a's outputs depend on features strictly before a."""
    changes = {"sliding_window": 6, "full_attention_layers": (1,)} if sliding else {}
    drafter = tiny_drafter(**changes)
    length, anchors = 16, [4, 6, 8]
    blocks = build_blocks([torch.tensor(anchors)], torch.ones(1, length, dtype=torch.bool), SIZE)
    features = torch.randn(1, length, len(TAPS), 16, requires_grad=True)
    masks = {
        "full_attention": training_mask(blocks, length, None),
        "sliding_attention": training_mask(blocks, length, 6),
    }
    context = drafter.read_context(features, torch.arange(length)[None])
    hidden = drafter(torch.randn(1, len(anchors) * SIZE, 16), blocks.positions.flatten(1), context, masks)
    for n, anchor in enumerate(anchors):
        (gradient,) = torch.autograd.grad(hidden[0, n * SIZE : (n + 1) * SIZE].sum(), features, retain_graph=True)
        by_position = gradient[0].abs().sum((1, 2))
        assert bool((by_position[anchor:] == 0).all())
        assert bool((by_position[max(0, anchor - 3) : anchor] > 0).all())


def test_a_block_among_others_equals_the_block_alone_and_as_decoded() -> None:
    drafter = tiny_drafter(sliding_window=6, full_attention_layers=(1,))
    torch.manual_seed(1)
    length, anchors = 16, [4, 6, 11]
    features, embeddings = torch.randn(1, length, len(TAPS), 16), torch.randn(1, len(anchors), SIZE, 16)
    loss_mask = torch.ones(1, length, dtype=torch.bool)

    def run(chosen: list[int]) -> torch.Tensor:
        blocks = build_blocks([torch.tensor([anchors[i] for i in chosen])], loss_mask, SIZE)
        masks = {
            "full_attention": training_mask(blocks, length, None),
            "sliding_attention": training_mask(blocks, length, 6),
        }
        context = drafter.read_context(features, torch.arange(length)[None])
        return drafter(embeddings[:, chosen].flatten(1, 2), blocks.positions.flatten(1), context, masks)

    together = run([0, 1, 2]).unflatten(1, (3, SIZE))
    for n, anchor in enumerate(anchors):
        torch.testing.assert_close(run([n])[0], together[0, n])
        seen = torch.arange(anchor)[None]
        context = drafter.read_context(features[:, :anchor], seen)
        masks = {
            kind: decoding_mask(torch.tensor([anchor]), SIZE, seen, torch.ones_like(seen).bool(), window)
            for kind, window in {"full_attention": None, "sliding_attention": 6}.items()
        }
        decoded = drafter(embeddings[:, n], (anchor + torch.arange(SIZE))[None], context, masks)
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


def test_kl_over_all_outcomes_is_the_plain_kl() -> None:
    torch.manual_seed(0)
    target, guess = torch.randn(6, 9).log_softmax(-1), torch.randn(6, 9).log_softmax(-1)
    plain = (target.exp() * (target - guess)).sum(-1)
    # All outcomes but one are known: the bucket holds exactly the last.
    torch.testing.assert_close(kl_with_tail(target[:, :8], guess[:, :8], torch.ones(6, 8).bool()), plain)
    known = torch.ones(6, 8).bool()
    known[:, 5] = False
    lost = kl_with_tail(target[:, :8], guess[:, :8], known)
    assert bool((lost <= plain + 1e-6).all()) and bool((lost >= 0).all())


def test_chunked_losses_equal_whole_ones_with_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(10, 6, requires_grad=True)
    head, labels = torch.randn(20, 6), torch.randint(20, (10,))
    ids = torch.randint(-1, 20, (10, 3))
    logprobs = torch.randn(10, 3).log_softmax(-1) - 1
    whole = slot_losses(hidden, head, labels, ids, logprobs)
    (expected,) = torch.autograd.grad((whole[0] + whole[1]).sum(), hidden)
    monkeypatch.setattr("foredraft.drafter.loss.CHUNK", 3)
    parts = slot_losses(hidden, head, labels, ids, logprobs)
    (gradient,) = torch.autograd.grad((parts[0] + parts[1]).sum(), hidden)
    for whole_part, part in zip(whole, parts, strict=True):
        torch.testing.assert_close(part, whole_part)
    torch.testing.assert_close(gradient, expected)
    ce = torch.nn.functional.cross_entropy(hidden @ head.T, labels, reduction="none")
    torch.testing.assert_close(whole[0], ce)
