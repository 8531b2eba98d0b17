"""The ``respond`` stage: the target answers every turn, as token ids.

A drafter learns to guess what the target says, so its data are the target's own answers, whatever the source held. Where
a source's answers already are the target's, its conversations go on as they are.
"""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from foredraft.accounts import Account
from foredraft.artifacts import Manifest, publish
from foredraft.chat.render import Renderer
from foredraft.conversations.schema import Conversation, open_conversations, read_conversations
from foredraft.launch import launch, place, process_count
from foredraft.progress import Progress
from foredraft.responses.config import RespondConfig
from foredraft.responses.dialogue import PROMPT_END, Dialogue, Outcome, opens_thinking
from foredraft.responses.local import LocalBackend
from foredraft.responses.log import AnswerLog
from foredraft.responses.rules import FAULTS, faults_of
from foredraft.responses.schema import Response, write_responses
from foredraft.responses.server import ServerBackend
from foredraft.scratch import Scratch, link, open_scratch, work_fingerprint
from foredraft.sources.config import FetchConfig
from foredraft.target.artifact import open_interface
from foredraft.target.config import TargetConfig
from foredraft.target.frozen import load_target
from foredraft.target.tokenizer import read_tokenizer
from foredraft.target.weights import checkpoint_folder

Item = TypeVar("Item")
ON_PURPOSE = {"prompt_too_long", "already_tokenised", "after_a_skipped_turn", "after_unclosed_thinking"}
"""Reasons for leaving a turn unanswered that are no fault of the source's."""


@dataclass(frozen=True)
class Job:
    """What every process that answers needs to know; plain values, since it travels to other processes."""

    name: str
    config: RespondConfig
    target: TargetConfig
    fetch: FetchConfig
    interface: Path
    parts: list[Path]
    scratch: Path


def respond(
    name: str,
    config: RespondConfig,
    target: TargetConfig,
    fetch: FetchConfig,
    conversations: Path,
    interface: Path,
    out: Path,
    processes: int | None = None,
) -> dict[str, Any]:
    """Answer the conversations of source ``name`` and publish the ``responses`` artefact ``out``; returns its account.

    Answers are kept in scratch as they come: a run that was stopped goes on with what is left.

    Args:
        processes: that answer beside each other, by default one for each local GPU.

    Raises:
        ValueError: no usable answer; more answers with a fault than its rule allows; the server cannot be reached.
    """
    source, parts = open_conversations(conversations, name)
    interface_manifest = open_interface(interface, target)
    if source.facts["answers"] == "keep":
        return _pass_on(source, interface_manifest.contract, parts, out)
    asking = {**config.asking(), "target": target.model_dump()}
    key = work_fingerprint("respond", asking, {"source": source, "target": interface_manifest})
    with open_scratch(f"respond-{name}", key) as scratch:
        job = Job(name, config, target, fetch, interface, parts, scratch.path)
        _answer_all(job, processes)
        return _publish(job, scratch, interface_manifest, out)


def _pass_on(source: Manifest, contract: dict[str, Any], parts: list[Path], out: Path) -> dict[str, Any]:
    """Publish the conversations themselves, by a second name."""
    rows = source.counts["rows_out"]
    counts = {"rows_in": rows, "rows_out": rows, "skipped": {}}
    manifest = Manifest(
        "responses", contract={**contract, "response_origin": "keep"}, counts=counts, facts={"answers": "keep"}
    )
    digests = {name: record.sha256 for name, record in source.files.items()}
    with publish(out, manifest, digests) as folder:
        for path in parts:
            link(path, folder / path.name)
    return counts


def _answer_all(job: Job, processes: int | None) -> None:
    """Fill the log: in this process, or in one for each GPU, through PyTorch's own launcher."""
    if job.config.backend == "server":
        processes = 1
    elif processes is None:
        processes = process_count()
    if processes == 1:
        answer_share(job)
        return
    launch(answer_launched_share, job, f"respond-{job.name}", job.scratch, processes)


def answer_launched_share(job: Job) -> None:
    """Answer the share of a process that PyTorch's launcher started."""
    answer_share(job, *place())


def answer_share(job: Job, rank: int = 0, world: int = 1, device: str | None = None) -> None:
    """Answer the ``rank``-th of ``world`` shares of what is not in the log yet."""
    facts = open_interface(job.interface).facts
    tokenizer = read_tokenizer(job.interface)
    renderer = Renderer(tokenizer, job.target.thinking)
    backend: LocalBackend | ServerBackend
    if job.config.backend == "server":
        eos = facts["eos_token_ids"]
        backend = ServerBackend(job.config, tokenizer, eos, renderer.end_id(eos))
        backend.check()
    else:
        backend = LocalBackend(job.config, lambda: _load(job, device), facts["eos_token_ids"])
    for part in job.parts:
        log = AnswerLog(job.scratch / part.stem, rank)
        rows = list(read_conversations(part))
        done = log.ids()
        title = f"respond-{job.name}" + (f"-{rank}" if world > 1 else "")
        with Progress(title, len(rows), "conversations", done=len(done)) as progress:
            groups = _groups(rows, job, renderer, tokenizer)
            # The first of a group tells whether it is done: a group is logged whole.
            mine = [g for i, g in enumerate(groups) if i % world == rank and g[0].outcome.id not in done]
            for group in _answered(backend, mine):
                log.append(dialogue.outcome for dialogue in group)
                progress.advance(len(group))


def _load(job: Job, device: str | None) -> Any:
    return load_target(checkpoint_folder(job.target, job.fetch), job.target, layer_ids=[0], device=device).model


def _groups(rows: list[Conversation], job: Job, renderer: Renderer, tokenizer: Any) -> list[list[Dialogue]]:
    """Conversations that are answered together: of like length, and the same ones in every run."""
    limit = job.config.max_prompt_tokens
    dialogues = [Dialogue(row, renderer, tokenizer, limit) for row in rows]
    # By length, so that a batch holds little padding; by id behind that, so that batches are the same every time.
    dialogues.sort(key=lambda dialogue: (len(dialogue.prompt_ids or []), dialogue.outcome.id))
    return even_batches(dialogues, 1 if job.config.backend == "server" else job.config.batch_size)


def _answered(backend: LocalBackend | ServerBackend, groups: list[list[Dialogue]]) -> Iterator[list[Dialogue]]:
    """Each group as soon as it is answered."""
    if backend.concurrency == 1:
        for group in groups:
            backend.answer(group)
            yield group
        return
    threads = ThreadPoolExecutor(backend.concurrency)
    waiting = {threads.submit(backend.answer, group): group for group in groups}
    failure: BaseException | None = None
    try:
        for done in as_completed(waiting):
            if done.cancelled():
                continue
            if (error := done.exception()) is None:
                yield waiting[done]  # also of those that were under way when another failed
            elif failure is None:
                failure = error
                for other in waiting:
                    other.cancel()
    finally:
        for other in waiting:
            other.cancel()
        threads.shutdown()
    if failure:
        raise failure


def even_batches(items: list[Item], largest: int) -> list[list[Item]]:
    """As few batches as ``largest`` allows, of sizes that differ by one at most: a batch of a few costs as many steps."""
    count = -(-len(items) // largest)
    bounds = [len(items) * i // max(1, count) for i in range(count + 1)]
    return [items[start:end] for start, end in itertools.pairwise(bounds)]


def _publish(job: Job, scratch: Scratch, interface: Manifest, out: Path) -> dict[str, Any]:
    """Apply the rules to what is in the log, and publish what stays."""
    judge = Judge(job.config, read_tokenizer(job.interface), interface.facts["eos_token_ids"])
    account, names = Account(f"sources.{job.name}"), []
    for part in job.parts:
        outcomes = {outcome.id: outcome for outcome in AnswerLog(job.scratch / part.stem).read()}
        usable: list[Response] = []
        for row in read_conversations(part):
            usable += judge.usable(row, outcomes[row.id], account)
        if usable:
            name = part.name.replace("conversations", "responses")
            scratch.write(name, lambda path, rows=usable: write_responses(rows, path))  # type: ignore[misc]
            names.append(name)
    judge.refuse(job.name)
    account.refuse_unusable(job.config.max_skip_ratio, "respond.max_skip_ratio")
    account.check(judge.kept)
    manifest = Manifest(
        "responses",
        contract={
            **interface.contract,
            "response_origin": f"generate, temperature {job.config.temperature}, top_p {job.config.top_p}",
        },
        counts=account.counts(),
        facts={"answers": "generate", "faults": judge.faults, "response_tokens": judge.tokens},
    )
    scratch.publish(out, manifest, names)
    return {**account.counts(), "faults": judge.faults, "response_tokens": judge.tokens}


class Judge:
    """Applies the rules of the params to answers, and counts their faults.

    Attributes:
        faults: answers with each fault, kept or not.
        answers, kept, tokens: answers seen, answers kept, their tokens.
    """

    def __init__(self, config: RespondConfig, tokenizer: Any, eos: list[int]):
        self._config, self._tokenizer, self._eos = config, tokenizer, set(eos)
        self._rules = {fault: getattr(config, fault) for fault in FAULTS}
        self.faults = dict.fromkeys(FAULTS, 0)
        self.answers = self.kept = self.tokens = 0

    def usable(self, row: Conversation, outcome: Outcome, account: Account) -> list[Response]:
        """The answers of one conversation that are training data, each turn counted in ``account``.

        What follows an answer that is left out stays: the target has said it, on that history.
        """
        usable = []
        for turn, answer in enumerate(outcome.answers):
            reason = self._reason_to_drop(answer.prompt_ids, answer.response_ids, answer.finish_reason)
            if reason:
                account.skip(reason, f"conversation {row.id}")
                continue
            account.keep()
            usable.append(
                Response(row.id, turn, row.split, answer.prompt_ids, answer.response_ids, answer.finish_reason)
            )
        for turn in range(len(outcome.answers), outcome.asked):
            reason = outcome.stopped if turn == len(outcome.answers) else "after_a_skipped_turn"
            account.skip(reason, f"conversation {row.id}", unusable=reason not in ON_PURPOSE)
        self.kept += len(usable)
        self.tokens += sum(len(response.response_ids) for response in usable)
        return usable

    def _reason_to_drop(self, prompt: list[int], response: list[int], finish_reason: str) -> str | None:
        said = [token for token in response if token not in self._eos]
        text = self._tokenizer.decode(said, skip_special_tokens=True)
        opened = opens_thinking(self._tokenizer.decode(prompt[-PROMPT_END:]))
        faults = faults_of(text, said, finish_reason, opened, self._config.loop_tokens)
        self.answers += 1
        for fault in faults:
            self.faults[fault] += 1
        return next((fault for fault in faults if not self._rules[fault].keep), None)

    def refuse(self, name: str) -> None:
        """Refuse a source of which too many answers have a fault.

        Raises:
            ValueError: names the fault, its rate and the rule.
        """
        for fault, rule in self._rules.items():
            rate = self.faults[fault] / max(1, self.answers)
            if rate > rule.max_ratio:
                hint = f" (respond.max_new_tokens = {self._config.max_new_tokens})" if fault == "truncated" else ""
                raise ValueError(
                    f"sources.{name}: {rate:.1%} of {self.answers} answers are {fault}{hint}, "
                    f"more than respond.{fault}.max_ratio = {rule.max_ratio}"
                )
