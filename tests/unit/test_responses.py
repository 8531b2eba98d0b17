"""How prompts are batched, and what of an answer is kept."""

import pytest

from foredraft.responses.respond import even_batches, history
from foredraft.target.greedy import cut_at_end


@pytest.mark.parametrize(
    ("count", "largest", "sizes"), [(139, 64, [46, 46, 47]), (64, 64, [64]), (3, 64, [3]), (0, 64, [])]
)
def test_batches_are_few_and_even_and_in_order(count: int, largest: int, sizes: list[int]) -> None:
    batches = even_batches(list(range(count)), largest)
    assert [len(batch) for batch in batches] == sizes
    assert [item for batch in batches for item in batch] == list(range(count))


def test_the_answer_answers_all_that_came_before_it() -> None:
    user, assistant, tool = ({"role": role, "content": "x"} for role in ("user", "assistant", "tool"))
    assert history([user, assistant]) == [user]
    assert history([user, assistant, tool]) == [user, assistant, tool]
    assert history([user]) == [user]


def test_an_answer_ends_with_its_first_end_of_turn_token() -> None:
    assert cut_at_end([5, 6, 2, 7, 2], {2, 3}) == [5, 6, 2]
    assert cut_at_end([5, 6], {2, 3}) == [5, 6]
