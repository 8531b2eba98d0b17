"""Which of many conversations say nearly the same, in memory that hardly grows with their number.

MinHash signatures of runs of words; rows whose signatures agree in a whole band are compared, and of two that are
alike enough the one with the smaller id stays. The outcome depends on the set of rows alone, never on their order.

Source: A. Broder, On the resemblance and containment of documents, 1997; the signatures are rensa's.
"""

import os
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

PERMUTATIONS, BANDS, SEED = 128, 16, 1
FACTOR = np.uint64(0x9E3779B97F4A7C15)
RUN = 5
"""Words in a run. With 16 bands of 8 values, rows that share 0.8 of their runs meet with probability 0.95, 0.9: 0.9999."""

MOST_COMPARED = 512
"""Of a group that meets in a band; only a flood of rows that are nearly but not quite the same has more."""
Signatures = NDArray[np.uint32]


def runs_of(words: list[str], apart: str = "") -> NDArray[np.uint64]:
    """One number for each run of words of a text; texts with another ``apart`` share none."""
    codes = np.array([zlib.crc32(word.encode()) for word in words or [""]], dtype=np.uint64)
    runs = np.full(max(1, len(codes) - RUN + 1), zlib.crc32(apart.encode()), dtype=np.uint64)
    for place in range(min(RUN, len(codes))):  # a polynomial in its words' codes, modulo 2 ** 64
        runs = runs * FACTOR + codes[place : place + len(runs)]
    return (runs ^ (runs >> np.uint64(29))) * FACTOR


def signatures_of(texts: list[NDArray[np.uint64]]) -> Signatures:
    """MinHash of each text's runs, ``(N, PERMUTATIONS)``."""
    from rensa import RMinHash

    ends = np.cumsum([0, *map(len, texts)], dtype=np.uint64)
    found = RMinHash.digest_matrix_from_flat_token_hashes(np.concatenate(texts), ends, PERMUTATIONS, SEED)
    return np.array(found.to_rows(), dtype=np.uint32)


def band_hashes(signatures: Signatures) -> NDArray[np.uint64]:
    """One number for each band of each row, ``(N, PERMUTATIONS)`` -> ``(N, BANDS)``.

    Two bands may have one number by chance; the rows are compared before anything follows from it.
    """
    width = PERMUTATIONS // BANDS
    factors = np.random.default_rng(SEED).integers(1 << 63, size=width, dtype=np.uint64) * 2 + 1
    bands = signatures.reshape(len(signatures), BANDS, width).astype(np.uint64)
    return (bands * factors).sum(-1, dtype=np.uint64)  # modulo 2 ** 64


class SignatureStore:
    """Signatures on disk, in the order added, one file for each band: finding pairs reads one band at a time."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True)
        self._bands = [folder / f"band-{number:02d}" for number in range(BANDS)]
        self._whole = folder / "signatures"
        self._streams: list[IO[bytes]] = [path.open("wb") for path in [*self._bands, self._whole]]

    def add(self, signatures: Signatures) -> None:
        """Append rows of ``(N, PERMUTATIONS)``."""
        for stream, column in zip(self._streams, band_hashes(signatures).T, strict=False):
            stream.write(column.tobytes())
        self._streams[-1].write(signatures.tobytes())

    def close(self) -> None:
        """Finish writing."""
        for stream in self._streams:
            stream.close()

    def near_duplicates(self, order: NDArray[np.int64], threshold: float) -> NDArray[np.bool_]:
        """Mark rows that are alike, by an estimated Jaccard index of ``threshold`` or more, to one that stays.

        Args:
            order: row numbers from first to last choice.

        Returns:
            ``(N,)``, by row number.
        """
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        earlier: dict[int, set[int]] = defaultdict(set)
        with self._whole.open("rb") as whole:
            for path in self._bands:
                for rows in _meeting(np.fromfile(path, dtype=np.uint64)):
                    for first, second in _alike(rows[np.argsort(rank[rows])], whole.fileno(), threshold):
                        earlier[second].add(first)
        dropped = np.zeros(len(order), dtype=np.bool_)
        for row in sorted(earlier, key=lambda row: rank[row]):
            dropped[row] = any(not dropped[other] for other in earlier[row])
        return dropped


def _meeting(hashes: NDArray[np.uint64]) -> Iterator[NDArray[np.int64]]:
    """Groups of two or more rows with the same number."""
    by_hash = np.argsort(hashes, kind="stable")
    ends = np.flatnonzero(np.diff(hashes[by_hash]) != 0) + 1
    bounds = np.concatenate([[0], ends, [len(hashes)]])
    for group in np.flatnonzero(np.diff(bounds) > 1):
        yield by_hash[bounds[group] : bounds[group + 1]]


def _alike(rows: NDArray[np.int64], file: int, threshold: float) -> Iterator[tuple[int, int]]:
    """Pairs (earlier choice, later choice) of rows, given in the order of choice.

    A row is compared with every earlier one but copies of one before it, of which there may be many.
    """
    earlier: list[tuple[int, Signatures]] = []
    for row in map(int, rows):
        mine = _read(file, row)
        shares = [float(np.mean(mine == other)) for _, other in earlier[:MOST_COMPARED]]
        yield from ((other, row) for (other, _), share in zip(earlier, shares, strict=False) if share >= threshold)
        if 1.0 not in shares:
            earlier.append((row, mine))


def _read(file: int, row: int) -> Any:
    size = PERMUTATIONS * 4
    return np.frombuffer(os.pread(file, size, row * size), dtype=np.uint32)
