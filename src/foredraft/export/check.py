"""What engines will make of the written files: each reads the config as that engine does, and must draft as was trained.

Readers differ on where a key stands, and take a class's default, in silence, where they do not find it. So a reading here
never complains of a missing key: it takes the default, and what comes of it is compared.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, Qwen3Config

from foredraft.artifacts import ArtifactError
from foredraft.drafter.config import DrafterConfig, DrafterShape
from foredraft.drafter.drafting import fill_blocks
from foredraft.drafter.model import Drafter
from foredraft.layouts.speculators import ENDS
from foredraft.layouts.zlab import WEIGHTS, read_config
from foredraft.target.interface import Interface

DEFAULT_ROPE_THETA = 10_000.0
"""Of Qwen3's config class."""
BUG = "this is a bug"
TOLERANCE = 1e-4
UNTIED = {"tie_word_embeddings": False}


def check_layouts(
    folder: Path, layouts: Sequence[str], trained: Drafter, interface: Interface, sample: dict[str, Tensor]
) -> None:
    """Read every layout back as its engines do, and let it draft behind a ``sample`` of real features.

    Args:
        trained: in the precision in which it was stored.
        sample: ``input_ids (T)`` and ``target_hidden (T, L, D)``, as training saw them.

    Raises:
        ArtifactError: a config says something else, or a reading has another shape, and names the key; or other logits, or
            other embeddings or another head than the target's.
    """
    wanted = draft_logits(trained, interface, sample)
    for layout in layouts:
        _same_keys(folder / layout, layout, trained.shape, interface)
        if layout == "transformers":
            _compare(
                folder / layout, "Transformers", wanted, _by_transformers(folder / layout, trained, interface, sample)
            )
            continue
        weights = load_file(folder / layout / WEIGHTS)
        if layout == "speculators":
            _same_ends(folder / layout, weights, interface)
        weights = {name: tensor for name, tensor in weights.items() if name not in ENDS}
        for engine, read in READERS[layout].items():
            shape = read(read_config(folder / layout), trained.shape)
            _same_shape(folder / layout, engine, trained.shape, shape)
            drafter = Drafter(shape)
            drafter.load_state_dict(weights)
            _compare(folder / layout, engine, wanted, draft_logits(drafter.eval(), interface, sample))


@torch.inference_mode()
def draft_logits(drafter: Drafter, interface: Interface, sample: dict[str, Tensor]) -> Tensor:
    """Of the block behind a sample, whose last token is the anchor: ``(S - 1, V)``, in float32."""
    ids, states, choice = sample["input_ids"].long(), sample["target_hidden"].float(), drafter.shape.choice
    seen = torch.arange(len(ids) - 1)[None]
    block = torch.full((choice.block_size,), choice.mask_token_id)
    block[0] = ids[-1]
    context = drafter.float().read_context(states[None, :-1], seen)
    embedded = interface.embed_tokens[block].float()[None]
    hidden = fill_blocks(drafter, embedded, torch.tensor([len(ids) - 1]), context, seen, torch.ones_like(seen).bool())
    return F.linear(hidden[0, 1:], interface.lm_head.float())


def by_flat_keys(config: dict[str, Any], trained: DrafterShape) -> DrafterShape:
    """As readers of before Transformers 5 do: ``rope_theta`` and ``block_size`` at the top."""
    return _shape(config, trained, config.get("rope_theta", DEFAULT_ROPE_THETA), config.get("block_size"), config)


def by_nested_keys(config: dict[str, Any], trained: DrafterShape) -> DrafterShape:
    """As newer ones do: within ``rope_parameters`` and ``dflash_config``."""
    rope, dflash = config.get("rope_parameters") or {}, config.get("dflash_config") or {}
    return _shape(config, trained, rope.get("rope_theta", DEFAULT_ROPE_THETA), dflash.get("block_size"), config)


def by_config_class(config: dict[str, Any], trained: DrafterShape) -> DrafterShape:
    """As those that go through Transformers' own config class, vLLM and z-lab's package among them."""
    parsed = Qwen3Config(**config).to_dict()
    return _shape(parsed, trained, parsed["rope_parameters"]["rope_theta"], config.get("block_size"), config)


def by_speculators(config: dict[str, Any], trained: DrafterShape) -> DrafterShape:
    """As vLLM reads this layout: taps counted from the embeddings, and as many slots as drafts and the anchor."""
    parsed = Qwen3Config(**config["transformer_layer_config"]).to_dict()
    (proposal,) = config["speculators_config"]["proposal_methods"]
    taps = [number - 1 for number in config["aux_hidden_state_layer_ids"]]
    where = {"dflash_config": {"mask_token_id": config["mask_token_id"], "target_layer_ids": taps}}
    block = 1 + proposal["speculative_tokens"]
    return _shape(parsed, trained, parsed["rope_parameters"]["rope_theta"], block, where)


def _shape(
    layers: dict[str, Any], trained: DrafterShape, rope_theta: float, block_size: Any, where: dict[str, Any]
) -> DrafterShape:
    """What is read of ``layers``; what no config says of the target is taken over."""
    types = layers.get("layer_types") or ["full_attention"] * layers["num_hidden_layers"]
    sliding = "sliding_attention" in types and layers.get("use_sliding_window", False)
    dflash = where.get("dflash_config") or {}
    return DrafterShape(
        choice=DrafterConfig(
            num_layers=layers["num_hidden_layers"],
            num_heads=layers["num_attention_heads"],
            num_kv_heads=layers["num_key_value_heads"],
            head_dim=layers["head_dim"],
            ffn_size=layers["intermediate_size"],
            block_size=block_size,
            mask_token_id=dflash["mask_token_id"],
            sliding_window=layers["sliding_window"] if sliding else None,
            full_attention_layers=tuple(i for i, t in enumerate(types) if t == "full_attention") if sliding else None,
        ),
        hidden_size=layers["hidden_size"],
        vocab_rows=layers["vocab_size"],
        target_layer_ids=tuple(dflash["target_layer_ids"]),
        num_target_layers=trained.num_target_layers,
        rms_norm_eps=layers["rms_norm_eps"],
        rope_theta=rope_theta,
        max_position_embeddings=layers["max_position_embeddings"],
    )


READERS: dict[str, dict[str, Callable[[dict[str, Any], DrafterShape], DrafterShape]]] = {
    "zlab": {
        "readers of flat keys": by_flat_keys,
        "readers of nested keys": by_nested_keys,
        "Transformers' config class": by_config_class,
    },
    "speculators": {"vLLM": by_speculators},
}


@torch.inference_mode()
def _by_transformers(folder: Path, trained: Drafter, interface: Interface, sample: dict[str, Tensor]) -> Tensor:
    """The same by Transformers' own class."""
    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32)
    ids, states, choice = sample["input_ids"].long(), sample["target_hidden"].float(), trained.shape.choice
    block = torch.full((1, choice.block_size), choice.mask_token_id)
    block[:, 0] = ids[-1]
    read = {
        "noise_embeds": interface.embed_tokens[block].float(),
        "context_hidden_states": states[None, :-1].flatten(2),
    }
    return F.linear(model(**read).last_hidden_state[0, 1:], interface.lm_head.float())


def silent_keys(layout: str, shape: DrafterShape, facts: dict[str, Any]) -> dict[str, Any]:
    """What a config must say that neither its reading nor the logits show, by key; None: nothing."""
    choice = shape.choice
    if layout == "transformers":
        return {
            "block_size": choice.block_size,
            "mask_token_id": choice.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
            "layer_types": list(choice.layer_types),
            "max_position_embeddings": shape.max_position_embeddings,
            "eos_token_id": facts["eos_token_ids"][0],
            "pad_token_id": facts["pad_token_id"],
        }
    if layout == "speculators":
        sizes = {"draft_vocab_size": shape.vocab_rows, "target_hidden_size": shape.hidden_size}
        return UNTIED | sizes | {"sliding_window_non_causal": False, "sample_from_anchor": False}
    windows = choice.num_layers if choice.sliding_window is None else 0
    return UNTIED | {"max_window_layers": windows, "is_causal": None, "num_target_layers": shape.num_target_layers}


def _same_keys(folder: Path, layout: str, trained: DrafterShape, interface: Interface) -> None:
    config = read_config(folder)
    for key, wanted in silent_keys(layout, trained, interface.manifest.facts).items():
        if config.get(key) != wanted:
            raise ArtifactError(folder, f"{key} is {config.get(key)!r}, expected {wanted!r}", BUG)


def _same_ends(folder: Path, weights: dict[str, Tensor], interface: Interface) -> None:
    kind = weights["fc.weight"].dtype
    for name, theirs in zip(ENDS, (interface.embed_tokens, interface.lm_head), strict=True):
        stored = weights.get(name)
        if stored is None or stored.dtype != kind or not torch.equal(stored, theirs.to(kind)):
            raise ArtifactError(folder, f"{name} is not the target's", BUG)


def _same_shape(folder: Path, engine: str, trained: DrafterShape, read: DrafterShape) -> None:
    mine, theirs = (shape.model_dump() | shape.choice.model_dump() for shape in (trained, read))
    for key in sorted(mine.keys() - {"choice"}):
        if mine[key] != theirs[key]:
            raise ArtifactError(folder, f"to {engine} {key} is {theirs[key]!r}, trained with {mine[key]!r}", BUG)


def _compare(folder: Path, engine: str, wanted: Tensor, found: Tensor) -> None:
    apart = float((found - wanted).abs().max() / wanted.abs().max())
    if not apart <= TOLERANCE:
        raise ArtifactError(folder, f"by {engine} the drafter's logits are {apart:.2g} of the largest off", BUG)
