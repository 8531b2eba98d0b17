"""The ``export`` section."""

from typing import Annotated, Literal

from pydantic import Field

from foredraft.params import Config

Layout = Literal["zlab", "speculators", "transformers"]


class ExportConfig(Config):
    """Which layouts are written beside z-lab's, which ``evaluate`` reads and so is always there."""

    layouts: tuple[Layout, ...] = Field(min_length=1)


class CardConfig(Config):
    """The ``card`` section."""

    name: str = Field(pattern=r"^[\w.-]+(/[\w.-]+)*$")
    """How the drafter is called where it is served from: a folder, or org/name on a hub."""
    licence: Annotated[str, Field(pattern=r"^[\w.+-]+$")] | None
    """Of the weights, as the hub writes licences; null: the card does not say."""
