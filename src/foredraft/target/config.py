"""The frozen model that drafts are verified by."""

from typing import Literal

from pydantic import Field

from foredraft.sources.config import Origin


class TargetConfig(Origin):
    """The ``target`` section. ``uri`` names a Transformers checkpoint, or one GGUF file, which is de-quantised."""

    dtype: Literal["bfloat16", "float32"]
    """In which the target answers and is tapped. float16 is not offered: hidden states pass its range."""
    thinking: bool
    """Passed to the chat template as ``enable_thinking``."""
    kept_layers: int = Field(ge=0)
    """How many of the last decoder layers are kept in ``data/target`` for a drafter to start from."""
    trust_remote_code: bool = False
    """Run code that the checkpoint ships. Needs a pinned revision, as every URI here has."""
