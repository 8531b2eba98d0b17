"""Answered and kept conversations -> documents of token ids and loss mask."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from foredraft.chat.supervise import Document
from foredraft.responses.schema import Response, read_responses


def merged(turns: list[Response]) -> list[Document]:
    """The documents of one conversation's answered turns, in their order.

    A turn whose prompt goes on from the turn before it, token for token, shares its document; where the template rewrote
    what came before, it begins one of its own. Ids are those that were generated.
    """
    documents: list[Document] = []
    for turn in turns:
        prompt, start = turn.prompt_ids, len(turn.prompt_ids)
        end = start + len(turn.response_ids)
        earlier: list[tuple[int, int]] = []
        if documents and prompt[: len(documents[-1].ids)] == documents[-1].ids:
            earlier = documents.pop().spans
        documents.append(Document(prompt + turn.response_ids, [*earlier, (start, end)]))
    return documents


def conversations_of(path: Path) -> Iterator[list[Response]]:
    """The turns of each conversation of a file, which stand together."""
    for _, turns in groupby(read_responses(path), key=lambda turn: turn.id):
        yield list(turns)
