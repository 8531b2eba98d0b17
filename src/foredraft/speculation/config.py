"""The ``evaluate`` section."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from foredraft.params import Config


class SamplingConfig(Config):
    """How tokens are drawn, of the target and of the drafter."""

    temperature: float = Field(ge=0.01)
    top_p: float = Field(gt=0, le=1)
    top_k: int = Field(ge=0)
    """0: all."""

    @property
    def name(self) -> str:
        """In metrics."""
        kept = [
            f"{key}_{value:g}"
            for key, value, all_ in (("top_p", self.top_p, 1), ("top_k", self.top_k, 0))
            if value != all_
        ]
        return "_".join([f"temperature_{self.temperature:g}", *kept])


class EvaluateConfig(Config):
    """How acceptance is measured."""

    layout: Literal["zlab", "speculators"]
    """Which of the exported folders is decoded with."""
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
    tree_budgets: tuple[Annotated[int, Field(gt=0)], ...]
    """Nodes of the trees that are measured beside the chain."""
    sampled: tuple[SamplingConfig, ...]
    """Beside greedy decoding: what the chain is measured at, with drafts drawn in the same way."""
    speed_prompts: int = Field(ge=0)
    """Prompts of each benchmark that are decoded one by one, against the clock; 0: no clock."""
    largest_gap: float = Field(gt=0, le=1)
    """Fail where accepted drafts per step fall short of those on training's held-out documents by more than this share."""
    seed: int = Field(ge=0, le=1_000_000)
    """Of the random drafter and of what is drawn."""

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        for key, names in (("sampled", [asked.name for asked in self.sampled]), ("tree_budgets", [*self.tree_budgets])):
            if len({*names}) < len(names):
                raise ValueError(f"{key} holds one entry twice")
        return self
