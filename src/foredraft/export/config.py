"""The ``export`` section."""

from typing import Literal

from pydantic import Field

from foredraft.params import Config

Layout = Literal["zlab", "speculators", "transformers"]


class ExportConfig(Config):
    """Which layouts are written beside z-lab's, which ``evaluate`` reads and so is always there."""

    layouts: tuple[Layout, ...] = Field(min_length=1)
