"""The ``evaluate`` section."""

from typing import Literal

from pydantic import Field

from foredraft.params import Config


class EvaluateConfig(Config):
    """How acceptance is measured."""

    prompts: int = Field(gt=0)
    """Held-out prompts of each benchmark, taken in the order of their hashes."""
    max_new_tokens: int = Field(ge=2)
    max_prompt_tokens: int = Field(gt=0)
    batch_size: int = Field(gt=0)
    """Prompts that decode together; targets with windowed layers decode one by one."""
    dtype: Literal["bfloat16", "float32"]
    """Of target and drafter. In float32 any difference from greedy decoding is a fault; in bfloat16 near-ties differ."""
    near_tie: float = Field(gt=0)
    """A first difference from greedy decoding is a near-tie if the two logits are this close; all others fail the stage."""
    lookup_ngram: int = Field(gt=0)
    """Prompt lookup matches this many last tokens, then fewer, down to one."""
    seed: int
    """Of the random drafter."""
