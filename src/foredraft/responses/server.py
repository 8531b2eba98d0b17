"""Answers by an OpenAI-compatible server: vLLM, SGLang, ``transformers serve``.

The plain completions endpoint is used, with prompts that the target's own template rendered here: so that the prompt is
the one that training sees, and the server's template, parsers and defaults have no say.
"""

import os
import random
import time
from collections.abc import Callable
from typing import Any

import requests

from foredraft.responses.config import RespondConfig
from foredraft.responses.dialogue import Dialogue
from foredraft.target.generate import cut_at_end

BUSY = {408, 409, 425, 429, 500, 502, 503, 504}
"""Answers after which it is worth asking again."""
LONGEST_PAUSE = 60.0


class ServerBackend:
    """Answers dialogues one request at a time; several threads may use it at once.

    Raises:
        ValueError: the server cannot be reached or refuses, after ``retries``; or it sees another prompt than we rendered.
    """

    def __init__(
        self, config: RespondConfig, tokenizer: Any, eos: list[int], pause: Callable[[float], None] = time.sleep
    ):
        assert config.server is not None
        self._config, self._server = config, config.server
        self._tokenizer, self._eos, self._pause = tokenizer, eos, pause
        self.concurrency = self._server.concurrency
        self._key = f"respond.server.url = {self._server.url}"

    def answer(self, dialogues: list[Dialogue]) -> None:
        """Bring every dialogue of a group to its end."""
        for dialogue in dialogues:
            while dialogue.prompt_ids is not None:
                reply = self._ask(dialogue.prompt_ids)
                choice = reply["choices"][0]
                ids = self._answer_ids(choice, reply.get("usage") or {})
                if ids is None:
                    dialogue.stop("tokens_not_proven")
                else:
                    dialogue.answer(ids, "stop" if ids and ids[-1] in self._eos else "length")

    def check(self) -> None:
        """Ask whether it is there, before anything is rendered.

        Raises:
            ValueError: it cannot be reached, or wants a key.
        """
        self._request("GET", "models")

    def _ask(self, prompt: list[int]) -> dict[str, Any]:
        return self._checked(self._request("POST", "completions", self._body(prompt)), len(prompt))

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> requests.Response:
        """The server's reply, asked for again while it is away or busy."""
        url, problem = f"{self._server.url.rstrip('/')}/{path}", ""
        for attempt in range(self._server.retries + 1):
            if attempt:
                # Growing and never the same for two: a server that comes back is not met by all at once.
                self._pause(min(LONGEST_PAUSE, 2.0**attempt) * (0.5 + random.random() / 2))
            try:
                reply = requests.request(
                    method, url, json=body, headers=_authorisation(), timeout=(10, self._server.timeout_seconds)
                )
            except requests.RequestException as error:
                problem = type(error).__name__
                continue
            if reply.status_code in {401, 403}:
                raise ValueError(f"{self._key}: wants a key, or another one; put it into OPENAI_API_KEY")
            if reply.status_code not in BUSY:
                return reply
            problem = f"HTTP {reply.status_code}: {_said(reply)}"
        raise ValueError(
            f"{self._key}: no answer after {self._server.retries + 1} tries ({problem}); "
            "is the server up? Answers so far are kept"
        )

    def _body(self, prompt: list[int]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._server.model,
            "max_tokens": self._config.max_new_tokens,
            "temperature": self._config.temperature,
            "top_p": self._config.top_p,
            "seed": self._config.seed,
        }
        if self._server.token_ids:
            return {**body, "prompt": prompt, "return_token_ids": True}
        return {**body, "prompt": self._tokenizer.decode(prompt, clean_up_tokenization_spaces=False)}

    def _checked(self, reply: requests.Response, prompt_tokens: int) -> dict[str, Any]:
        url = self._key
        if reply.status_code != 200:
            raise ValueError(f"{url}: refuses with HTTP {reply.status_code}: {_said(reply)}")
        try:
            content = reply.json()
            seen = (content.get("usage") or {}).get("prompt_tokens")
            choice = content["choices"][0]
        except (requests.JSONDecodeError, AttributeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{url}: not a completions endpoint ({error!r}); it should end in /v1") from error
        if seen is not None and seen != prompt_tokens:
            raise ValueError(
                f"{url}: saw {seen} tokens in a prompt of {prompt_tokens}: "
                "it serves another tokenizer than the target's, or adds tokens of its own"
            )
        if self._server.token_ids and choice.get("token_ids") is None:
            raise ValueError(f"{url}: sends no token ids; set respond.server.token_ids: false")
        return content

    def _answer_ids(self, choice: dict[str, Any], usage: dict[str, Any]) -> list[int] | None:
        """The answer's ids; from text only if they are as many as the server generated."""
        stopped = choice.get("finish_reason") == "stop"
        if self._server.token_ids:
            ids = cut_at_end(list(choice["token_ids"]), set(self._eos))
            return [*ids, self._eos_token()] if stopped and (not ids or ids[-1] not in self._eos) else ids
        ids = self._tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
        if any(token in self._eos for token in ids):
            ids = cut_at_end(ids, set(self._eos))
        elif stopped:
            ids = [*ids, self._eos_token()]
        counted = usage.get("completion_tokens")
        # Servers count the end-of-turn token, or do not.
        return ids if counted in {None, len(ids), len(ids) - stopped} else None

    def _eos_token(self) -> int:
        own = self._tokenizer.eos_token_id
        return own if own in self._eos else self._eos[0]


def _authorisation() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _said(reply: requests.Response) -> str:
    return " ".join(reply.text.split())[:200]
