"""Rendered text -> token ids, and where in the text a token begins."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

PROBE = "Plain, déjà vu, 你好, 🙂\n\n\t  x'll 1234 <b>"


@dataclass(frozen=True)
class Encoded:
    """Token ids of a text, and for each the byte of the text at which it begins, with the text's length behind."""

    ids: list[int]
    begins: NDArray[np.int64]

    def token_at(self, byte: int) -> int | None:
        """The token that begins at a byte; None where none does, so also at the end."""
        index = int(np.searchsorted(self.begins, byte))
        return index if index < len(self.ids) and self.begins[index] == byte else None


class TextTokenizer:
    """Tokenises rendered text: control tokens are the template's own, and none is added.

    For a byte-level vocabulary the places of tokens follow from their lengths, which is a quarter faster than to ask the
    library for them; for any other it is asked.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._backend: Any = tokenizer.backend_tokenizer
        special = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        widths = np.zeros(max([*tokenizer.get_vocab().values(), *special, 0]) + 1, dtype=np.int64)
        for token, i in tokenizer.get_vocab().items():
            widths[i] = len(token.encode()) if i in special else len(token)  # one letter stands for one byte
        self._widths = widths
        self.by_width = self._agrees_with_offsets(PROBE)

    def ids(self, text: str) -> list[int]:
        """Token ids of ``text``."""
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode(self, text: str) -> Encoded:
        """Token ids and their places."""
        if self.by_width:
            encoded = self._by_width(text)
            if encoded.begins[-1] == len(text.encode()):
                return encoded
        return self._by_offsets(text)

    def _by_width(self, text: str) -> Encoded:
        ids = self.ids(text)
        return Encoded(ids, np.concatenate([[0], self._widths[ids].cumsum()]))

    def _by_offsets(self, text: str) -> Encoded:
        encoding = self._backend.encode(text, add_special_tokens=False)
        bytes_before = np.concatenate([[0], np.cumsum([len(letter.encode()) for letter in text])])
        begins = [bytes_before[start] for start, _ in encoding.offsets]
        return Encoded(encoding.ids, np.array([*begins, bytes_before[-1]], dtype=np.int64))

    def _agrees_with_offsets(self, text: str) -> bool:
        by_width, by_offsets = self._by_width(text), self._by_offsets(text)
        # Of a letter that several tokens share, the library gives the same place to all.
        return bool(by_width.begins[-1] == len(text.encode()) and by_width.ids == by_offsets.ids)
