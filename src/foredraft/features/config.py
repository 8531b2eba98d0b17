"""What is read off the target."""

from typing import Annotated, Literal

from pydantic import Field

from foredraft.params import Config


class ExtractConfig(Config):
    """The ``extract`` section."""

    target_layer_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    """Taps: k is the residual stream after 0-based decoder block k, before any final norm."""
    top_k: int = Field(gt=0, le=1024)
    """How many of the target's own next tokens are stored at each supervised token."""
    batch_tokens: int = Field(gt=0)
    """Tokens a forward pass may hold, padding included."""
    shard_tokens: int = Field(gt=0)
    """About how many tokens a feature shard holds: the unit of work and of resume. A token takes taps x hidden size x 2
    bytes."""
    storage: Literal["bfloat16"]
    """Type of the stored features."""
    truth_check_documents: int = Field(gt=0)
    """How many documents are compared with the target's own outputs before the work starts."""
