"""A section of ``params.yaml`` becomes a frozen, typed model, or is refused by name.

The file is read as YAML 1.2, the way DVC reads it: ``1e-4`` is a number here and there.
"""

import json
import re
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError


class Config(BaseModel):
    """Base of every config model: frozen, strict, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


# A source's name becomes part of stage names and folders; "-" would let two names join into one.
SOURCE_NAME = re.compile(r"[a-z][a-z0-9_]*")
ConfigT = TypeVar("ConfigT", bound=Config)


def read_params(path: Path) -> dict[str, Any]:
    """Read a whole params file.

    Raises:
        ValueError: the file is missing, is not YAML, or is not a mapping of sections.
    """
    try:
        content = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such params file") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping of sections, found {type(content).__name__}")
    return content


def parse_section(path: Path, section: str, content: Any, model: type[ConfigT]) -> ConfigT:
    """Validate one section; every fault is named by its dotted key and its value.

    Raises:
        ValueError: unknown, missing or ill-typed keys.
    """
    try:
        return model.model_validate_json(json.dumps(content))
    except (ValidationError, TypeError) as error:
        raise ValueError(_describe(path, section, error)) from None


def load_section(path: Path, section: str, model: type[ConfigT]) -> ConfigT:
    """Load ``section`` (dots descend: ``sources.code``) of the params file at ``path``."""
    content: Any = read_params(path)
    for key in section.split("."):
        if not isinstance(content, dict) or key not in content:
            raise ValueError(f"{path}: section '{section}' is missing")
        content = content[key]
    return parse_section(path, section, content, model)


def source_names(path: Path) -> list[str]:
    """Names of the sources in the params file at ``path``, sorted.

    Raises:
        ValueError: there are none.
    """
    sources = read_params(path).get("sources")
    if not isinstance(sources, dict) or not sources:
        raise ValueError(f"{path}: sources: expected a mapping of at least one source")
    return sorted(sources)


def _describe(path: Path, section: str, error: ValidationError | TypeError) -> str:
    if isinstance(error, TypeError):
        return f"{path}: {section}: {error}"
    lines = []
    for fault in error.errors(include_url=False):
        key = ".".join([section, *map(str, fault["loc"])])
        if fault["type"] == "extra_forbidden":
            lines.append(f"{path}: unknown key {key}")
        elif fault["type"] == "missing":
            lines.append(f"{path}: missing key {key}")
        else:
            got = "" if isinstance(fault["input"], dict) else f" (got {fault['input']!r})"
            lines.append(f"{path}: {key}: {fault['msg'].removeprefix('Value error, ')}{got}")
    return "\n".join(lines)
