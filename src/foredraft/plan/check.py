"""Check a whole params file before anything runs, without importing torch."""

import re
import sys
from pathlib import Path
from typing import Any

from foredraft.benchmarks.config import BenchmarksConfig
from foredraft.conversations.config import CurateConfig
from foredraft.export.config import CardConfig, ExportConfig
from foredraft.features.config import ExtractConfig
from foredraft.params import SOURCE_NAME, Config, parse_section, read_params
from foredraft.responses.config import RespondConfig
from foredraft.sources.config import FetchConfig, SourceConfig
from foredraft.sources.fetch import changed_on_disk
from foredraft.speculation.config import EvaluateConfig
from foredraft.target.config import TargetConfig
from foredraft.tokens.config import PrepareConfig
from foredraft.training.config import TrainConfig

SECTIONS: dict[str, type[Config]] = {
    "target": TargetConfig,
    "fetch": FetchConfig,
    "benchmarks": BenchmarksConfig,
    "curate": CurateConfig,
    "respond": RespondConfig,
    "prepare": PrepareConfig,
    "extract": ExtractConfig,
    "train": TrainConfig,
    "export": ExportConfig,
    "evaluate": EvaluateConfig,
    "card": CardConfig,
}
SOURCES = "sources"
SECRET_WORDS = re.compile(r"(^|_)(token|secret|password|api_key)$")


def check_params(path: Path) -> None:
    """Validate every section and what spans sections.

    Raises:
        ValueError: all faults, a line each.
    """
    content = read_params(path)
    faults = [f"{path}: unknown section {name}" for name in content if name not in {*SECTIONS, SOURCES}]
    faults += [f"{path}: missing section {name}" for name in (*SECTIONS, SOURCES) if name not in content]
    for name, model in SECTIONS.items():
        if name in content:
            faults += _faults(path, name, content[name], model)
    faults += _source_faults(path, content.get(SOURCES, {}))
    faults += [f"{path}: {key}: secrets belong in the environment, not in params" for key in _secret_keys(content)]
    if not faults:
        faults = _joint_faults(path, content)
    if faults:
        raise ValueError("\n".join(faults))


def _faults(path: Path, name: str, content: Any, model: type[Config]) -> list[str]:
    try:
        parse_section(path, name, content, model)
    except ValueError as error:
        return [str(error)]
    return []


def _source_faults(path: Path, sources: Any) -> list[str]:
    if not isinstance(sources, dict) or not sources:
        return [f"{path}: sources: expected a mapping of at least one source"]
    faults = []
    for name, content in sources.items():
        if not SOURCE_NAME.fullmatch(str(name)):
            faults.append(
                f"{path}: sources.{name}: a name has lower-case letters, digits and _, and starts with a letter"
            )
        faults += _faults(path, f"sources.{name}", content, SourceConfig)
    return faults


def _joint_faults(path: Path, content: dict[str, Any]) -> list[str]:
    drafter, kept = content["train"]["drafter"], content["target"]["kept_layers"]
    faults = []
    if content["train"]["start"] == "target" and kept < drafter["num_layers"]:
        faults.append(f"{path}: train.start = target needs target.kept_layers >= train.drafter.num_layers, got {kept}")
    if content["prepare"]["min_supervised_tokens"] < drafter["block_size"]:
        faults.append(f"{path}: prepare.min_supervised_tokens is less than a block of {drafter['block_size']}")
    written = {"zlab", *content["export"]["layouts"]}
    if content["evaluate"]["layout"] not in written:
        faults.append(f"{path}: evaluate.layout = {content['evaluate']['layout']} is not among export.layouts")
    if drafter.get("sliding_window") is not None and "transformers" in written:
        faults.append(
            f"{path}: export.layouts: transformers cannot say train.drafter.sliding_window; leave that layout out"
        )
    start = content["train"]["start"]
    if start not in {"target", "random"} and not Path(start).is_dir():
        faults.append(f"{path}: train.start = {start}: target, random, or a folder with a drafter, which is not there")
    return faults


def check_local_sources(path: Path, data: Path) -> None:
    """Refuse to go on from a local file that changed after it was fetched.

    Raises:
        ValueError: names the sources, and what fetches them again.
    """
    sources = read_params(path)[SOURCES]
    changed = [
        name
        for name, content in sources.items()
        if changed_on_disk(parse_section(path, f"{SOURCES}.{name}", content, SourceConfig), data / "raw" / name)
    ]
    if changed:
        uris = ", ".join(sources[name]["uri"] for name in changed)
        stages = " ".join(f"fetch@{name}" for name in changed)
        raise ValueError(f"{uris}: changed after it was fetched; run: dvc repro --force --single-item {stages}")


def _secret_keys(content: Any, prefix: str = "") -> list[str]:
    if not isinstance(content, dict):
        return []
    found = [f"{prefix}{key}" for key in content if SECRET_WORDS.search(str(key))]
    return found + [hit for key, value in content.items() for hit in _secret_keys(value, f"{prefix}{key}.")]


if __name__ == "__main__":
    try:
        for name in sys.argv[1:]:
            check_params(Path(name))
            check_local_sources(Path(name), Path("data"))
    except ValueError as error:
        sys.exit(f"Error: {error}")
