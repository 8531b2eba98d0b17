"""The ``respond`` stage: the target answers every prompt, greedily, as token ids.

A drafter learns to guess what the target says, so its data are the target's own answers, whatever the source held.
"""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any, TypeVar

from foredraft.artifacts import Manifest
from foredraft.chat.render import Renderer, UnrenderablePrompt
from foredraft.conversations.curate import open_conversations
from foredraft.conversations.schema import Conversation
from foredraft.progress import Progress
from foredraft.responses.config import RespondConfig
from foredraft.responses.schema import RESPONSES, Response, read_responses, write_responses
from foredraft.scratch import Scratch, open_scratch, work_fingerprint
from foredraft.sources.config import FetchConfig
from foredraft.target.artifact import open_interface
from foredraft.target.config import TargetConfig
from foredraft.target.frozen import load_target
from foredraft.target.greedy import greedy_answers
from foredraft.target.interface import read_tokenizer
from foredraft.target.weights import checkpoint_folder

Item = TypeVar("Item")


def respond(
    name: str,
    config: RespondConfig,
    target: TargetConfig,
    fetch: FetchConfig,
    conversations: Path,
    interface: Path,
    out: Path,
) -> None:
    """Answer the conversations of source ``name`` and publish the ``responses`` artefact ``out``.

    Answered batches are kept in scratch: a run that was stopped goes on with the next batch.

    Raises:
        ValueError: no usable answer, or more truncated ones than ``max_truncated_ratio``.
    """
    source, rows = open_conversations(conversations, name)
    interface_manifest = open_interface(interface)
    renderer = Renderer(read_tokenizer(interface), target.thinking)
    skipped: Counter[str] = Counter()
    prompts = _prompts(rows, renderer, config, skipped)

    key = work_fingerprint(
        "respond",
        {**config.model_dump(), "target": target.model_dump()},
        {"source": source, "target": interface_manifest},
    )
    with open_scratch(f"respond-{name}", key) as scratch:
        if config.origin == "keep":
            answers = _kept(rows, prompts, renderer, skipped)
        else:
            eos = interface_manifest.facts["eos_token_ids"]
            answers = _generate_all(name, prompts, config, eos, lambda: _load(target, fetch), scratch)
        usable = _usable(answers, skipped)
        _check(name, rows, usable, skipped, config)
        scratch.write(RESPONSES, lambda path: write_responses(sorted(usable, key=lambda row: row.id), path))
        contract = {**interface_manifest.contract, "response_origin": config.origin}
        manifest = Manifest(
            "responses",
            contract=contract,
            counts={"rows_in": len(rows), "rows_out": len(usable), "skipped": dict(sorted(skipped.items()))},
            facts={
                "truncated": sum(row.finish_reason == "length" for row in usable),
                "response_tokens": sum(len(row.response_ids) for row in usable),
            },
        )
        scratch.publish(out, manifest, [RESPONSES])


def _load(target: TargetConfig, fetch: FetchConfig) -> Any:
    return load_target(checkpoint_folder(target, fetch), target, layer_ids=[0]).model


def _prompts(
    rows: list[Conversation], renderer: Renderer, config: RespondConfig, skipped: Counter[str]
) -> list[tuple[Conversation, list[int]]]:
    prompts = []
    for row in rows:
        try:
            prompt = renderer.prompt_ids(history(row.messages), row.tools)
        except UnrenderablePrompt as reason:
            skipped[str(reason)] += 1
            continue
        if len(prompt) > config.max_prompt_tokens:
            skipped["prompt_too_long"] += 1
        else:
            prompts.append((row, prompt))
    # By length, so that a batch holds little padding; by id behind that, so that batches are the same every time.
    return sorted(prompts, key=lambda pair: (len(pair[1]), pair[0].id))


def history(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages up to the last turn that is not the assistant's: what the answer answers."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return messages[:end]


def _generate_all(
    name: str,
    prompts: list[tuple[Conversation, list[int]]],
    config: RespondConfig,
    eos: list[int],
    load: Any,
    scratch: Scratch,
) -> list[Response]:
    batches = even_batches(prompts, config.batch_size)
    model = None
    answers: list[Response] = []
    with Progress(f"respond-{name}", len(prompts), "answers") as progress:
        for number, batch in enumerate(batches):
            part = f"batch-{number:05d}.parquet"
            if not scratch.has(part):
                model = model or load()
                found = greedy_answers(model, [prompt for _, prompt in batch], config.max_new_tokens, eos)
                rows = [_answer(*pair, answer, eos) for pair, answer in zip(batch, found, strict=True)]
                scratch.write(part, lambda path, rows=rows: write_responses(rows, path))  # type: ignore[misc]
            answers += read_responses(scratch.path / part)
            progress.advance(len(batch))
    return answers


def even_batches(items: list[Item], largest: int) -> list[list[Item]]:
    """As few batches as ``largest`` allows, of sizes that differ by one at most: a batch of a few costs as many steps."""
    count = -(-len(items) // largest)
    bounds = [len(items) * i // max(1, count) for i in range(count + 1)]
    return [items[start:end] for start, end in itertools.pairwise(bounds)]


def _answer(row: Conversation, prompt: list[int], answer: list[int], eos: list[int]) -> Response:
    return Response(row.id, row.split, prompt, answer, "stop" if answer[-1] in eos else "length")


def _kept(
    rows: list[Conversation], prompts: list[tuple[Conversation, list[int]]], renderer: Renderer, skipped: Counter[str]
) -> list[Response]:
    answers = []
    for row, prompt in prompts:
        if row.messages[-1]["role"] != "assistant":
            skipped["no_answer_to_keep"] += 1
        else:
            answer = renderer.answer_ids(row.messages[-1]["content"])
            answers.append(Response(row.id, row.split, prompt, answer, "stop"))
    return answers


def _usable(answers: list[Response], skipped: Counter[str]) -> list[Response]:
    usable = [row for row in answers if len(row.response_ids) > 1]
    if len(usable) < len(answers):
        skipped["empty_answer"] += len(answers) - len(usable)
    return usable


def _check(
    name: str, rows: list[Conversation], usable: list[Response], skipped: Counter[str], config: RespondConfig
) -> None:
    if len(rows) != len(usable) + skipped.total():
        raise AssertionError(f"row account is off: {len(rows)} in, {len(usable)} out, skipped {dict(skipped)}")
    if not usable:
        raise ValueError(f"sources.{name}: no usable answer of {len(rows)} prompts; skipped {dict(skipped)}")
    ratio = sum(row.finish_reason == "length" for row in usable) / len(usable)
    if ratio > config.max_truncated_ratio:
        raise ValueError(
            f"sources.{name}: {ratio:.0%} of the answers ran into respond.max_new_tokens = {config.max_new_tokens}, "
            f"more than respond.max_truncated_ratio = {config.max_truncated_ratio}"
        )
