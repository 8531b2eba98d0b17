"""What is read off the target."""

from typing import Annotated, Literal

from pydantic import Field

from foredraft.params import Config


class ExtractConfig(Config):
    """The ``extract`` section."""

    target_layer_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    """Taps: k is the residual stream after 0-based decoder block k, before any final norm."""
    top_k: int = Field(ge=0, le=1024)
    """How many of the target's own next tokens are stored at each supervised token; 0: none, and no block after the last tap
    is run."""
    batch_tokens: int = Field(gt=0)
    """Tokens a forward pass may hold, padding included."""
    shard_tokens: int = Field(gt=0)
    """About how many tokens a feature shard holds: the unit of work and of resume. A token takes taps x hidden size x 2
    bytes, half of that in float8."""
    storage: Literal["bfloat16", "float8_e4m3fn"]
    """Type of the stored features; float8 comes with a scale for each token and tap."""
    kernels: Literal["auto", "stock"]
    """``auto``: faster blocks where this target and this machine have them; ``stock``: Transformers' own everywhere."""
    truth_check_documents: int = Field(gt=0)
    """How many documents, of the first shards, are compared with the target's own outputs before the work starts."""
