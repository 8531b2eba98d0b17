"""The ``train`` section."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from foredraft.drafter.config import FLOAT8_MULTIPLE, DrafterConfig, LossConfig
from foredraft.params import Config


class TrainConfig(Config):
    """The ``train`` section."""

    drafter: DrafterConfig
    start: str = Field(min_length=1)
    """``random``; ``target``: layers from the target's last ones, ``fc`` a copy of the last tap, norms from the target's;
    or a folder that holds a drafter of this shape in z-lab's or speculators' layout."""
    head_rows: Literal["occurring", "full"]
    """Vocabulary rows of the training head: those that occur in the answers, or all. Validation always uses all."""
    float8: Literal["none", "head", "all"]
    """Products in float8, at twice the rate on a GPU and with a little noise: those with the training head, or the layers'
    too. The weights stay what they are, and validation has none of it."""
    loss: LossConfig
    periodic_tails: float = Field(ge=0, le=1)
    """What tokens of an answer's tail that repeats itself weigh: 1 as all others, 0 nothing; then they are no anchors."""
    optimizer: Literal["adamw", "muon"]
    """AdamW; or Muon for matrices and AdamW for the rest."""
    lr: float = Field(gt=0)
    schedule: Literal["cosine", "linear", "wsd"]
    """After the warm-up: a cosine to zero, a line to zero, or constant and then a line to zero over the last fifth."""
    warmup: float = Field(ge=0, lt=1)
    """Share of the steps."""
    weight_decay: float = Field(ge=0)
    """On matrices; norms have none."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]
    clip: float = Field(gt=0)
    """Largest norm of the gradient."""
    average: float = Field(ge=0, lt=1)
    """Decay by step of an exponential moving average of the weights, which is then validated and published; 0: none."""
    epochs: int = Field(gt=0, le=10_000)
    tokens_per_row: int = Field(gt=0)
    """Tokens of a row, which documents are packed into: one forward pass."""
    anchors_per_row: int = Field(gt=0, le=65_536)
    """Blocks of a row, shared among its documents in proportion to their supervised tokens."""
    tokens_per_step: int = Field(gt=0)
    """Tokens of an optimiser step, whatever the number of GPUs: whole rows."""
    compute_dtype: Literal["bfloat16", "float32"]
    """Of matrix products."""
    weights_dtype: Literal["bfloat16", "float32"]
    """Of the trained weights and of the optimiser's state. bfloat16 halves their memory; small updates are lost in it."""
    parallel: Literal["ddp", "fsdp"]
    """Over several GPUs: each holds all weights, or a share of the weights, gradients and optimiser's state."""
    seed: int = Field(ge=0, le=1_000_000)
    validate_every: int = Field(gt=0)
    """Steps between validations. The weights with the most tokens per step on them are published."""
    validation_anchors: int = Field(gt=0, le=4_194_304)
    checkpoint_every: int = Field(gt=0)
    """Steps between checkpoints; a killed run goes on from the last complete one."""
    tracker: Literal["tensorboard", "wandb"] | None
    """Where the curve is told beside DVCLive's files; that package is to be installed."""
    max_skipped_steps: int = Field(ge=0)
    """Stop after this many steps with a non-finite loss or gradient."""

    @model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        if self.optimizer == "muon" and self.parallel == "fsdp":
            raise ValueError("optimizer = muon needs whole matrices: parallel = ddp")
        if self.float8 != "none" and self.loss.ce + self.loss.kl + self.loss.tv > 3.5:
            raise ValueError("float8 holds gradients up to 3.5: lower loss.ce, .kl and .tv, and raise lr instead")
        slots = self.anchors_per_row * self.drafter.block_size
        if self.float8 == "all" and slots % FLOAT8_MULTIPLE:
            raise ValueError(
                f"float8 = all needs anchors_per_row * block_size = {slots} to be a multiple of {FLOAT8_MULTIPLE}"
            )
        if self.tokens_per_step % self.tokens_per_row:
            raise ValueError(
                f"tokens_per_step = {self.tokens_per_step} is no multiple of tokens_per_row = {self.tokens_per_row}"
            )
        return self

    @property
    def rows_per_step(self) -> int:
        """Rows that make up a step."""
        return self.tokens_per_step // self.tokens_per_row
