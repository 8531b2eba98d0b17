"""What decides which conversations are kept."""

import re

from pydantic import Field, field_validator

from foredraft.params import Config


class CurateConfig(Config):
    """The ``curate`` section."""

    min_prompt_chars: int = Field(ge=1)
    """Shorter prompts (all turns together) are dropped as ``too_short``."""
    max_prompt_chars: int = Field(gt=0)
    """Longer ones as ``too_long``; tool schemas count."""
    drop_matching: dict[str, str]
    """Reason -> regular expression: a conversation in which it matches is dropped under that reason."""
    contamination_words: int = Field(gt=1)
    """A conversation that shares this many words in a row with a benchmark prompt is dropped as ``contaminated``."""
    validation_share: float = Field(gt=0, lt=1)
    """Share of groups held out for validation, by hash."""
    max_skip_ratio: float = Field(gt=0, le=1)
    """Fail when more than this share of the raw rows is unusable (limits and filters are not faults)."""

    @field_validator("drop_matching")
    @classmethod
    def _check_patterns(cls, patterns: dict[str, str]) -> dict[str, str]:
        for reason, pattern in patterns.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{reason}: not a regular expression ({error})") from error
        return patterns
