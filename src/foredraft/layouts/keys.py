"""Which keys a drafter's config may have, and what they must say.

Readers of other projects pass over a key that they do not know, and draft otherwise than was trained. Here such a key is
refused by name, and so is every value that cannot be what it says it is.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from foredraft.artifacts import ArtifactError

REMEDY = "it is no drafter in this layout; of our own: dvc repro export"
OTHER = "it is another kind of drafter, and none is known here"
LARGEST = 2**31 - 1

IDLE = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "transformers_version", "speculators_version"),
        *("has_no_defaults_at_init", "dtype", "torch_dtype", "initializer_range", "attention_dropout", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "chunk_size_feed_forward"),
        *("output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type"),
    }
)
"""Keys that say nothing of what a drafter does. Its head is the target's, tied or not; of its type the tensors tell."""
QWEN3 = frozenset(
    {
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps"),
        *("rope_theta", "rope_parameters", "rope_scaling"),
        *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    }
)
"""Keys of a Qwen3 config that are read."""
AS_OURS: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "is_encoder_decoder": False,
    "is_causal": False,
    "causal": False,
    "is_neox_style": True,
    "partial_rotary_factor": 1.0,
    "rope_type": "default",
    "type": "default",
    "use_swa": False,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "use_aux_hidden_state": True,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "logit_scale": 1.0,
    "shift_label": False,
    "sample_from_anchor": False,
    "speculators_model_type": "dflash",
    "algorithm": "dflash",
    "default_proposal_method": "greedy",
    "proposal_type": "greedy",
    "verifier_accept_k": 1,
    "accept_tolerance": 0.0,
}
"""Keys that other drafters have with other values, and what is said where they say nothing new."""

PUBLISHED_AS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_size": "intermediate_size",
    "vocab_rows": "vocab_size",
    "full_attention_layers": "layer_types",
}
"""Our own words for what configs call otherwise."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Make one line that names the file and the key of whatever a model of ours finds wrong in a config.

    Raises:
        ArtifactError: instead of pydantic's own error, or of what a value of another type brings about.
    """
    try:
        yield
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        told = fault["msg"].removeprefix("Value error, ")
        key = f"{fault['loc'][0]} is {fault['input']!r}: " if fault["loc"] else ""
        raise ArtifactError(path, _in_published_words(key + told), REMEDY) from None
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        raise ArtifactError(path, f"cannot be read: {type(error).__name__}: {error}", REMEDY) from error


def require_known(config: dict[str, Any], path: Path, read: Collection[str], where: str = "") -> None:
    """Refuse what is not known to be harmless, unless it is null or empty.

    Args:
        read: keys whose values the caller looks at.
        where: put before a key in messages, such as ``dflash_config.``.

    Raises:
        ArtifactError: names the key.
    """
    for key, value in config.items():
        if key in read or key in IDLE or value is None or value == {}:
            continue
        if key not in AS_OURS:
            raise ArtifactError(path, f"{where}{key} is {value!r:.200}, and that key is not known here", OTHER)
        if value != AS_OURS[key]:
            raise ArtifactError(path, f"{where}{key} is {value!r:.200}, and a drafter here has {AS_OURS[key]!r}", OTHER)


def require_equal_key(config: dict[str, Any], path: Path, key: str, wanted: Any, why: str) -> None:
    """Refuse another value than ``wanted``, unless it is null.

    Raises:
        ArtifactError: names the key and ``why`` it must be so.
    """
    if config.get(key) not in (None, wanted):
        raise ArtifactError(path, f"{key} is {config[key]!r}, and {why} {wanted!r}", OTHER)


def section(config: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    """The mapping under a key, empty where there is none.

    Raises:
        ArtifactError: something else stands there.
    """
    found = config.get(key)
    if found is not None and not isinstance(found, dict):
        raise ArtifactError(path, f"{key} is {found!r}, expected a mapping", REMEDY)
    return found or {}


def one_value(key: str, path: Path, *places: Any) -> Any:
    """The value that stands in one of these places, or in several alike.

    Raises:
        ArtifactError: there is none, or there are two.
    """
    values = [value for value in places if value is not None]
    if not values:
        raise ArtifactError(path, f"has no {key}", REMEDY)
    if any(value != values[0] for value in values[1:]):
        raise ArtifactError(path, f"holds two values of {key}: {values}", REMEDY)
    return values[0]


def whole(key: str, path: Path, *places: Any, least: int = 1) -> int:
    """The same, of a whole number from ``least`` on."""
    return int(_checked(key, path, places, f"a whole number from {least} on", lambda v: _is_whole(v, least)))


def positive(key: str, path: Path, *places: Any) -> float:
    """The same, of a finite number above 0."""
    return float(_checked(key, path, places, "a number above 0", _is_positive))


def flag(key: str, path: Path, config: dict[str, Any]) -> bool:
    """A key that is true or false; false where there is none."""
    return bool(_checked(key, path, (config.get(key) or False,), "true or false", lambda v: isinstance(v, bool)))


def distinct(key: str, path: Path, *places: Any, numbers: range) -> tuple[int, ...]:
    """A list of some of the ``numbers`` of the target's layers, each once.

    Raises:
        ArtifactError: as :func:`one_value`; or it is something else.
    """
    told = f"different layers of the target, numbered {numbers.start} to {numbers.stop - 1}"
    return tuple(_checked(key, path, places, told, lambda v: _are_distinct(v, numbers)))


def _checked(key: str, path: Path, places: Collection[Any], told: str, right: Callable[[Any], bool]) -> Any:
    value = one_value(key, path, *places)
    if not right(value):
        raise ArtifactError(path, f"{key} is {value!r}, expected {told}", REMEDY)
    return value


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= LARGEST


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= LARGEST * LARGEST and math.isfinite(value)


def _are_distinct(value: Any, numbers: range) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(type(number) is int and number in numbers for number in value) and len(set(value)) == len(value)


def _in_published_words(text: str) -> str:
    return re.sub(r"\w+", lambda word: PUBLISHED_AS.get(word[0], word[0]), text)
