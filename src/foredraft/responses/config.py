"""How the target answers."""

from typing import Literal

from pydantic import Field, model_validator

from foredraft.params import Config


class Rule(Config):
    """What becomes of answers with a fault, and how many of them are too many."""

    keep: bool
    """Whether such answers are training data all the same."""
    max_ratio: float = Field(ge=0, le=1)
    """Fail when more than this share of a source's answers has the fault."""


class ServerConfig(Config):
    """An OpenAI-compatible server that serves the target; its key, if it wants one, is ``OPENAI_API_KEY`` in the
    environment."""

    url: str = Field(pattern=r"^https?://")
    """Up to and with ``/v1``."""
    model: str
    """The name that the server knows the target by."""
    token_ids: bool
    """Whether it takes prompts as token ids and gives answers as such (vLLM: ``return_token_ids``). Otherwise both travel
    as text, and an answer whose length in tokens is not what the server counted is left out."""
    concurrency: int = Field(gt=0)
    """Requests in flight."""
    retries: int = Field(ge=0)
    """Further tries of a request, with growing pauses, while the server is away or busy."""
    timeout_seconds: float = Field(gt=0)
    """Give up a try when the server has sent nothing for this long."""


class RespondConfig(Config):
    """The ``respond`` section; ``target.thinking`` says whether the target thinks before it answers."""

    backend: Literal["transformers", "server"]
    """``transformers``: in this process, on every local GPU. ``server``: see ``server``."""
    server: ServerConfig | None = None
    max_new_tokens: int = Field(gt=0)
    max_prompt_tokens: int = Field(gt=0)
    """Longer prompts are left out as ``prompt_too_long``."""
    batch_size: int = Field(gt=0)
    """Conversations that are answered together in this process."""
    temperature: float = Field(ge=0)
    """0: greedy."""
    top_p: float = Field(gt=0, le=1)
    seed: int = Field(ge=0, le=1_000_000)
    max_skip_ratio: float = Field(gt=0, le=1)
    """Fail when the template refuses, or no token ids can be proven for, more than this share of the turns."""
    truncated: Rule
    """Answers that ran into ``max_new_tokens``."""
    empty: Rule
    """Answers without a word, thinking apart."""
    unclosed_thinking: Rule
    """Answers that never came to the end of their thinking."""
    looping: Rule
    """Answers that end in the same words over and over; see ``loop_tokens``."""
    loop_tokens: int = Field(ge=6)
    """An answer loops when its last so many tokens, or more, are one piece repeated at least three times."""

    @model_validator(mode="after")
    def _check_server(self) -> "RespondConfig":
        if self.backend == "server" and self.server is None:
            raise ValueError("backend server needs server")
        return self

    def asking(self) -> dict[str, object]:
        """What decides the answers themselves, not what becomes of them or where they are asked for."""
        keys = ("backend", "max_new_tokens", "max_prompt_tokens", "batch_size", "temperature", "top_p", "seed")
        server = {"model": self.server.model, "token_ids": self.server.token_ids} if self.server else None
        return {**{key: getattr(self, key) for key in keys}, "server": server}
