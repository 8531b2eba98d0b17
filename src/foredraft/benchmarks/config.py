"""Held-out prompts."""

from pydantic import Field, field_validator

from foredraft.params import SOURCE_NAME, Config
from foredraft.sources.config import RowShape

OTHER_KEYS = {"pooled", "baselines", "trees", "sampled", "settings", "gap", "overlap", "left_out", "commit"}
OTHER_KEYS |= {"speed", "costs", "recommendation"}
"""Keys of an evaluation's metrics that are no benchmark."""


class BenchmarksConfig(Config):
    """The ``benchmarks`` section."""

    sets: dict[str, RowShape] = Field(min_length=1)
    """Benchmarks by the name that they have in metrics, beside :data:`OTHER_KEYS`."""
    max_prompt_chars: int = Field(gt=0)
    """Longer prompts are left out, and counted. All others are kept: training data are compared with every one of them,
    and ``evaluate.prompts`` says how many of them are run."""

    @field_validator("sets")
    @classmethod
    def _named(cls, sets: dict[str, RowShape]) -> dict[str, RowShape]:
        if odd := [name for name in sets if name in OTHER_KEYS or not SOURCE_NAME.fullmatch(name)]:
            raise ValueError(
                f"{', '.join(odd)}: a benchmark's name has lower-case letters, digits and _, a letter first, and is none of "
                f"{', '.join(sorted(OTHER_KEYS))}"
            )
        return sets
