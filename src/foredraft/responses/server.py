"""Answers by an OpenAI-compatible server: vLLM, SGLang, ``transformers serve``.

The plain completions endpoint is used, with prompts that the target's own template rendered here: so that the prompt is
the one that training sees, and the server's template, parsers and defaults have no say.
"""

import hashlib
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
NO_HABITS = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Against the checkpoint's own generation config, which vLLM applies to what a request leaves open."""


class ServerBackend:
    """Answers dialogues one request at a time; several threads may use it at once.

    Raises:
        ValueError: the server cannot be reached or refuses, after ``retries``; or it sees another prompt than we rendered.
    """

    def __init__(
        self,
        config: RespondConfig,
        tokenizer: Any,
        eos: list[int],
        end_id: int,
        pause: Callable[[float], None] = time.sleep,
    ):
        assert config.server is not None
        self._config, self._server = config, config.server
        self._tokenizer, self._eos, self._end_id, self._pause = tokenizer, eos, end_id, pause
        self.concurrency = self._server.concurrency
        self._key = f"respond.server.url = {self._server.url}"

    def answer(self, dialogues: list[Dialogue]) -> None:
        """Bring every dialogue of a group to its end."""
        for dialogue in dialogues:
            while dialogue.prompt_ids is not None:
                reply = self._ask(dialogue.prompt_ids, self._seed(dialogue))
                choice = reply["choices"][0]
                if choice.get("finish_reason") not in {"stop", "length"}:
                    dialogue.stop("answer_broken_off")
                    continue
                ids = self._answer_ids(choice, reply["usage"]["completion_tokens"])
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

    def _seed(self, dialogue: Dialogue) -> int:
        """Another for each turn: servers draw every request from its own seed, and equal ones would draw alike."""
        text = f"{self._config.seed} {dialogue.outcome.id} {len(dialogue.outcome.answers)}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1

    def _ask(self, prompt: list[int], seed: int) -> dict[str, Any]:
        return self._checked(self._request("POST", "completions", self._body(prompt, seed)), len(prompt))

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

    def _body(self, prompt: list[int], seed: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._server.model,
            "max_tokens": self._config.max_new_tokens,
            "temperature": self._config.temperature,
            "top_p": self._config.top_p,
            "seed": seed,
        }
        if self._server.token_ids:
            return {**body, **NO_HABITS, "prompt": prompt, "return_token_ids": True}
        return {**body, "prompt": self._tokenizer.decode(prompt, clean_up_tokenization_spaces=False)}

    def _checked(self, reply: requests.Response, prompt_tokens: int) -> dict[str, Any]:
        url = self._key
        if reply.status_code != 200:
            raise ValueError(f"{url}: refuses with HTTP {reply.status_code}: {_said(reply)}")
        try:
            content = reply.json()
            choice = content["choices"][0]
            choice["token_ids" if "token_ids" in choice else "text"]
        except (requests.JSONDecodeError, AttributeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{url}: not a completions endpoint ({error!r}); it should end in /v1") from error
        usage = content.get("usage") or {}
        if usage.get("prompt_tokens") is None or usage.get("completion_tokens") is None:
            raise ValueError(
                f"{url}: does not say how many tokens it saw and made (usage); what it says cannot be proven"
            )
        if (seen := usage["prompt_tokens"]) != prompt_tokens:
            raise ValueError(
                f"{url}: saw {seen} tokens in a prompt of {prompt_tokens}: "
                "it serves another tokenizer than the target's, or adds tokens of its own"
            )
        if self._server.token_ids and choice.get("token_ids") is None:
            raise ValueError(f"{url}: sends no token ids; set respond.server.token_ids: false")
        return content

    def _answer_ids(self, choice: dict[str, Any], counted: int) -> list[int] | None:
        """The answer's ids; from text only if they are as many as the server says it generated, its end included."""
        if self._server.token_ids:
            ids = list(choice["token_ids"])
        else:
            ids = self._tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
        ids = cut_at_end(ids, set(self._eos))
        if choice["finish_reason"] == "stop" and (not ids or ids[-1] not in self._eos):
            ids.append(self._end_id)
        return ids if self._server.token_ids or len(ids) == counted else None


def _authorisation() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _said(reply: requests.Response) -> str:
    return " ".join(reply.text.split())[:200]
