"""The shape of a drafter, in the words of its published configs, and what it is trained to say."""

from typing import Any, Literal

from pydantic import Field, model_validator

from foredraft.params import Config

FLOAT8_MULTIPLE = 16
"""What products in float8 ask of sizes."""


class DrafterConfig(Config):
    """The ``train.drafter`` section: what a user chooses. The rest of the shape is the target's."""

    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0, multiple_of=2)
    ffn_size: int = Field(gt=0)
    block_size: int = Field(ge=2, le=128)
    """Slots of a block; block_size - 1 drafts a step."""
    mask_token_id: int = Field(ge=0)
    """A vocabulary row that the data never use."""
    sliding_window: int | None = Field(default=None, gt=0)
    """Window of the sliding layers, in tokens, counted from each query."""
    full_attention_layers: tuple[int, ...] | None = None
    """Layers that see everything, both ways inside the block; the others slide and are causal inside it. null: all."""

    @model_validator(mode="after")
    def _check(self) -> "DrafterConfig":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} is no multiple of num_kv_heads = {self.num_kv_heads}")
        if (self.sliding_window is None) != (self.full_attention_layers is None):
            raise ValueError("sliding_window and full_attention_layers go together")
        if any(not 0 <= layer < self.num_layers for layer in self.full_attention_layers or ()):
            raise ValueError(
                f"full_attention_layers = {self.full_attention_layers}: layers are 0 to {self.num_layers - 1}"
            )
        return self

    @property
    def layer_types(self) -> tuple[Literal["full_attention", "sliding_attention"], ...]:
        """Attention of each layer, in the words of published configs."""
        full = range(self.num_layers) if self.full_attention_layers is None else self.full_attention_layers
        return tuple("full_attention" if i in full else "sliding_attention" for i in range(self.num_layers))


class DrafterShape(Config):
    """All that decides a drafter's forward pass: the user's choice and what it takes over from the target."""

    choice: DrafterConfig
    hidden_size: int
    vocab_rows: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int


class LossConfig(Config):
    """The ``train.loss`` section."""

    labels: Literal["target_argmax", "data"]
    """What a slot is asked for: the target's likeliest id there, or the token in the data."""
    ce: float = Field(ge=0)
    """Weight of the cross-entropy on the label."""
    kl: float = Field(ge=0)
    """Weight of the KL divergence from the stored top-k, with a bucket for all other ids."""
    tv: float = Field(ge=0)
    """Weight of the total variation from the same."""
    weights: Literal["decay", "dpace"]
    gamma: float = Field(gt=0)
    """``decay``: slot k weighs exp(-(k - 1) / gamma)."""
    alpha: float = Field(ge=0, le=1)
    """``dpace``: how far confidence is drawn towards 1."""
    equal_blocks: bool
    """Scale the weights of each block to the same sum, so that blocks that are guessed well do not count for more."""

    @model_validator(mode="after")
    def _check(self) -> "LossConfig":
        if self.ce + self.kl + self.tv == 0:
            raise ValueError("ce, kl and tv are all 0: there is nothing to learn")
        return self


def require_free_mask(mask_token_id: int, facts: dict[str, Any]) -> None:
    """Refuse a mask token that means something to the target of these ``facts``.

    Raises:
        ValueError: it is past the embedding, or an end or padding token.
    """
    key = f"train.drafter.mask_token_id = {mask_token_id}"
    if mask_token_id >= facts["vocab_rows"]:
        raise ValueError(f"{key}: the target has {facts['vocab_rows']} embedding rows")
    if mask_token_id in (*facts["eos_token_ids"], facts["pad_token_id"]):
        raise ValueError(f"{key}: that is the target's end-of-turn or padding token")
