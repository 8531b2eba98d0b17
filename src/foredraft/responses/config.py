"""How the target answers."""

from typing import Literal

from pydantic import Field

from foredraft.params import Config


class RespondConfig(Config):
    """The ``respond`` section."""

    origin: Literal["generate", "keep"]
    """``generate``: the target answers each prompt. ``keep``: the last assistant turn already is the target's."""
    max_new_tokens: int = Field(gt=0)
    max_prompt_tokens: int = Field(gt=0)
    """Longer prompts are left out as ``prompt_too_long``."""
    batch_size: int = Field(gt=0)
    max_truncated_ratio: float = Field(gt=0, le=1)
    """Fail when more than this share of the answers ran into ``max_new_tokens``."""
