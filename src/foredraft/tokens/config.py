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
    """About how many tokens a shard holds; a shard is the unit of work and of resume in ``extract``."""
