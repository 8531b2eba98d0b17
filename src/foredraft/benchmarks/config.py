"""Held-out prompts."""

from pydantic import Field

from foredraft.params import Config
from foredraft.sources.config import RowShape


class BenchmarksConfig(Config):
    """The ``benchmarks`` section."""

    sets: dict[str, RowShape] = Field(min_length=1)
    """Benchmarks by the name that they have in metrics."""
    max_prompt_chars: int = Field(gt=0)
    """Longer prompts are left out, and counted. All others are kept: training data are compared with every one of them,
    and ``evaluate.prompts`` says how many of them are run."""
