"""Row accounts: rows in = rows out + the sum of named skips, in every stage."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Account:
    """Counts rows as they are kept or skipped under a reason.

    ``first`` remembers where each reason was met first, for messages. Unusable rows (not those left out on purpose) are
    counted apart, since too many of them mean that the source is not what it was taken for.
    """

    name: str
    kept: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    unusable: int = 0
    seen: int = 0
    """What the rows came from, where one may give several (a trace, a conversation of many turns)."""

    @property
    def rows_in(self) -> int:
        """All rows seen."""
        return self.kept + self.skipped.total()

    def keep(self) -> None:
        """Count a row that stays."""
        self.kept += 1

    def skip(self, reason: str, place: str = "", unusable: bool = False) -> None:
        """Count a row that goes, and where the first of its reason was."""
        self.skipped[reason] += 1
        self.unusable += unusable
        if place:
            self.first.setdefault(reason, place)

    def drop(self, reason: str, count: int) -> None:
        """Move ``count`` rows that were kept so far to a reason."""
        if count:
            self.kept -= count
            self.skipped[reason] += count

    def add(self, other: "Account") -> None:
        """Take in the account of a later part."""
        self.kept += other.kept
        self.skipped.update(other.skipped)
        self.unusable += other.unusable
        self.seen += other.seen
        self.first = {**other.first, **self.first}

    def check(self, rows_out: int) -> None:
        """Compare with what is about to be written.

        Raises:
            ValueError: nothing is left.
            AssertionError: rows were lost or made up; our own bug.
        """
        assert self.kept == rows_out, f"{self.name}: {self.kept} rows counted, {rows_out} written"
        self.refuse_nothing()

    def refuse_nothing(self) -> None:
        """Refuse to go on without a row.

        Raises:
            ValueError: names the reasons.
        """
        if not self.kept:
            raise ValueError(f"{self.name}: no usable row of {self.rows_in}: {self}")

    def refuse_unusable(self, ratio: float, key: str) -> None:
        """Refuse a source of which too much cannot be used.

        Raises:
            ValueError: more than ``ratio`` of what the rows came from; names the reasons.
        """
        seen = self.seen or self.rows_in
        if self.kept and self.unusable > ratio * seen:
            raise ValueError(f"{self.name}: more than {key} = {ratio} unusable of {seen}: {self}")

    def counts(self) -> dict[str, Any]:
        """For the manifest and the metrics."""
        return {"rows_in": self.rows_in, "rows_out": self.kept, "skipped": dict(sorted(self.skipped.items()))}

    def __str__(self) -> str:
        parts = []
        for reason, count in self.skipped.most_common():
            where = f" (first: {self.first[reason]})" if reason in self.first else ""
            parts.append(f"{count} {reason}{where}")
        return ", ".join(parts)
