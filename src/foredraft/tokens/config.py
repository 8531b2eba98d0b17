"""How answers become token shards."""

from pydantic import Field

from foredraft.params import Config


class PrepareConfig(Config):
    """The ``prepare`` section."""

    max_length: int = Field(gt=0)
    """Documents are cut to this many tokens, from the end."""
    min_supervised_tokens: int = Field(ge=2)
    """Documents with fewer supervised tokens are left out; fewer than a block teach little."""
    shard_tokens: int = Field(gt=0)
    """About how many tokens a shard holds."""
    max_skip_ratio: float = Field(gt=0, le=1)
    """Fail when the template refuses, or no mask can be proven for, more than this share of the conversations."""
