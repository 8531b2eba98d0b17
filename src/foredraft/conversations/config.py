"""What decides which conversations are kept."""

import re

from pydantic import Field, field_validator, model_validator

from foredraft.params import Config
from foredraft.sources.config import Kind


class CurateConfig(Config):
    """The ``curate`` section."""

    min_prompt_chars: int = Field(ge=1)
    """Shorter prompts (all turns together) are dropped as ``too_short``."""
    max_prompt_chars: int = Field(gt=0)
    """Longer ones as ``too_long``; tool schemas count."""
    languages: list[str] | None
    """ISO 639-1 codes: what the user says in another language is dropped as ``other_language``. Null: any."""
    drop_matching: dict[str, str]
    """Reason -> regular expression: a conversation in which it matches is dropped under that reason."""
    near_duplicate: float | None = Field(gt=0, le=1)
    """Of conversations whose runs of five words overlap (Jaccard) by this much or more, one stays. Null: only exact
    duplicates go."""
    contamination_words: int = Field(gt=1)
    """A conversation that shares this many words in a row with a benchmark prompt is dropped as ``contaminated``."""
    weights: dict[Kind, float]
    """Kind -> share of its rows that is kept, by hash, so that raising it only adds; 1 where nothing is said."""
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

    @field_validator("weights")
    @classmethod
    def _check_weights(cls, weights: dict[Kind, float]) -> dict[Kind, float]:
        for kind, weight in weights.items():
            if not 0 < weight <= 1:
                raise ValueError(f"{kind} = {weight}: expected a share above 0 and up to 1")
        return weights

    @field_validator("languages")
    @classmethod
    def _check_languages(cls, languages: list[str] | None) -> list[str] | None:
        if languages is not None and not (languages and all(re.fullmatch("[a-z]{2}", code) for code in languages)):
            raise ValueError(f"{languages}: expected ISO 639-1 codes such as en")
        return languages

    @model_validator(mode="after")
    def _check_chars(self) -> "CurateConfig":
        if self.min_prompt_chars > self.max_prompt_chars:
            raise ValueError(f"min_prompt_chars = {self.min_prompt_chars} is more than max_prompt_chars")
        return self
