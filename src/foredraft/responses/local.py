"""Answers by Transformers in this process: batches of conversations, all of one turn at a time."""

import hashlib
from collections.abc import Callable
from typing import Any

from foredraft.responses.config import RespondConfig
from foredraft.responses.dialogue import Dialogue
from foredraft.target.generate import Sampling, batched_answers, batches_continuously, continuous_answers


class LocalBackend:
    """Answers groups of dialogues.

    Args:
        load: gives the model; called when the first group comes, so that a run with nothing left to do loads none.
        eos: every id that ends an answer.
    """

    concurrency = 1

    def __init__(self, config: RespondConfig, load: Callable[[], Any], eos: list[int]):
        self._config, self._load, self._eos = config, load, eos
        self._model: Any = None

    def answer(self, dialogues: list[Dialogue]) -> None:
        """Bring every dialogue of a group to its end."""
        self._model = self._model or self._load()
        generate = continuous_answers if batches_continuously(self._model) else batched_answers
        turn = 0
        while waiting := [dialogue for dialogue in dialogues if dialogue.prompt_ids is not None]:
            prompts = [dialogue.prompt_ids or [] for dialogue in waiting]
            sampling = Sampling(self._config.temperature, self._config.top_p, self._seed(waiting, turn))
            answers = generate(self._model, prompts, self._config.max_new_tokens, self._eos, sampling)
            for dialogue, answer in zip(waiting, answers, strict=True):
                dialogue.answer(answer, "stop" if answer[-1] in self._eos else "length")
            turn += 1

    def _seed(self, dialogues: list[Dialogue], turn: int) -> int:
        """The same for the same group and turn, whatever was answered before it."""
        names = ",".join(dialogue.outcome.id for dialogue in dialogues)
        text = f"{self._config.seed} {turn} {names}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
