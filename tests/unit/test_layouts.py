"""One drafter in every layout: read by every engine's keys, converted there and back, refused where it is not ours."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from foredraft.artifacts import ArtifactError, Manifest
from foredraft.drafter.model import Drafter
from foredraft.export.check import check_layouts, draft_logits
from foredraft.layouts.convert import main, to_speculators, to_zlab
from foredraft.layouts.read import read_drafter
from foredraft.layouts.speculators import write_speculators
from foredraft.layouts.zlab import CONFIG, METADATA, WEIGHTS, as_stored, shape_from_config, write_zlab, zlab_config
from foredraft.target.interface import Interface
from tests.builders import keep_interface, make_interface, tiny_frozen
from tests.conftest import HIDDEN, TAPS, VOCABULARY, tiny_drafter

WINDOW = {"sliding_window": 16, "full_attention_layers": (1,)}
TARGET = ("hf:org/target@1", "LlamaForCausalLM")


@pytest.fixture(scope="module")
def interface() -> Interface:
    made = make_interface(tiny_frozen())
    made.manifest.facts.update(num_layers=tiny_drafter().shape.num_target_layers, architecture=TARGET[1])
    made.manifest.contract["target"] = TARGET[0]
    return made


@pytest.fixture(scope="module")
def sample() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(24, len(TAPS), HIDDEN, generator=generator).bfloat16()
    return {"input_ids": torch.randint(VOCABULARY, (24,), generator=generator), "target_hidden": states}


def write_both(folder: Path, interface: Interface, **changes: Any) -> Drafter:
    """Both layouts of a drafter, which is returned as it was stored."""
    drafter = tiny_drafter(7, **changes)
    weights = as_stored(drafter.state_dict())
    write_zlab(folder / "zlab", drafter.shape, weights, METADATA)
    ends = (interface.embed_tokens, interface.lm_head)
    write_speculators(folder / "speculators", drafter.shape, weights, ends, TARGET, METADATA)
    drafter.load_state_dict(weights)
    return drafter


def edit(path: Path, change: Any) -> None:
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("changes", [{}, WINDOW], ids=["full", "windows"])
def test_every_engine_reads_what_was_trained(
    tmp_path: Path, interface: Interface, sample: dict[str, torch.Tensor], changes: dict[str, Any]
) -> None:
    drafter = write_both(tmp_path, interface, **changes)
    check_layouts(tmp_path, ["zlab", "speculators"], drafter, interface, sample)


@pytest.mark.parametrize(
    ("layout", "change", "key"),
    [
        ("zlab", lambda c: c.pop("rope_theta"), "readers of flat keys rope_theta is 10000.0, trained with 50000.0"),
        ("zlab", lambda c: c.pop("rope_parameters"), "readers of nested keys rope_theta is 10000.0"),
        ("zlab", lambda c: c["dflash_config"].update(block_size=5), "readers of nested keys block_size is 5"),
        ("zlab", lambda c: c.update(use_sliding_window=False), "full_attention_layers is None, trained with"),
        ("zlab", lambda c: c.update(sliding_window=8), "sliding_window is 8, trained with 16"),
        ("zlab", lambda c: c["dflash_config"].update(target_layer_ids=[1, 2]), "target_layer_ids is"),
        ("speculators", lambda c: c.update(aux_hidden_state_layer_ids=list(TAPS)), "vLLM target_layer_ids is"),
        (
            "speculators",
            lambda c: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=4),
            "vLLM block_size is 5, trained with 4",
        ),
        (
            "speculators",
            lambda c: c["transformer_layer_config"]["rope_parameters"].update(rope_theta=1e6),
            "vLLM rope_theta is 1000000.0",
        ),
    ],
)
def test_a_key_that_an_engine_reads_otherwise_is_named(
    tmp_path: Path, interface: Interface, sample: dict[str, torch.Tensor], layout: str, change: Any, key: str
) -> None:
    drafter = write_both(tmp_path, interface, **WINDOW)
    shape = drafter.shape.model_copy(update={"rope_theta": 5e4})
    drafter.shape = shape
    for name in ("zlab", "speculators"):
        for form in [lambda c: c, lambda c: c["transformer_layer_config"]][name == "speculators" :][:1]:
            edit(tmp_path / name / CONFIG, lambda c, form=form: form(c).update(rope_theta=5e4))
            edit(tmp_path / name / CONFIG, lambda c, form=form: form(c)["rope_parameters"].update(rope_theta=5e4))
    check_layouts(tmp_path, ["zlab", "speculators"], drafter, interface, sample)
    edit(tmp_path / layout / CONFIG, change)
    with pytest.raises(ArtifactError, match=key):
        check_layouts(tmp_path, ["zlab", "speculators"], drafter, interface, sample)


def test_weights_that_draft_otherwise_are_found(
    tmp_path: Path, interface: Interface, sample: dict[str, torch.Tensor]
) -> None:
    drafter = write_both(tmp_path, interface)
    weights = load_file(tmp_path / "zlab" / WEIGHTS)
    weights["hidden_norm.weight"] *= 1.5
    save_file(weights, tmp_path / "zlab" / WEIGHTS, metadata=METADATA)
    with pytest.raises(ArtifactError, match="by readers of flat keys the drafter's logits are .* off"):
        check_layouts(tmp_path, ["zlab"], drafter, interface, sample)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_there_and_back_the_tensors_are_the_same_to_the_byte(
    tmp_path: Path, interface: Interface, dtype: torch.dtype
) -> None:
    drafter = tiny_drafter(3, **WINDOW)
    weights = {name: tensor.to(dtype) for name, tensor in drafter.state_dict().items()}
    write_zlab(tmp_path / "z", drafter.shape, weights, METADATA | {"foredraft": "{}"})
    keep_interface(interface, tmp_path / "target")
    runner = CliRunner()
    for source, out in (("z", "s"), ("s", "back"), ("back", "again")):
        arguments = [str(tmp_path / source), str(tmp_path / out), "--target", str(tmp_path / "target")]
        told = runner.invoke(main, arguments)
        assert told.exit_code == 0, told.output
    for first, last in (("z", "back"), ("s", "again")):
        assert json.loads((tmp_path / first / CONFIG).read_text()) == json.loads((tmp_path / last / CONFIG).read_text())
        one, two = (load_file(tmp_path / name / WEIGHTS) for name in (first, last))
        assert one.keys() == two.keys()
        for name in one:
            assert one[name].dtype == two[name].dtype == dtype and torch.equal(one[name], two[name])
    assert read_drafter(tmp_path / "s", torch.float32).shape == drafter.shape
    verifier = json.loads((tmp_path / "s" / CONFIG).read_text())["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == "org/target"
    told = runner.invoke(main, [str(tmp_path / "z"), str(tmp_path / "s")])
    assert told.exit_code == 1 and "exists" in told.output and "Traceback" not in told.output


def test_conversion_asks_for_the_drafters_own_target(tmp_path: Path, interface: Interface) -> None:
    write_both(tmp_path, interface)
    facts = interface.manifest.facts | {"hidden_size": 99}
    other = replace(interface, manifest=Manifest("target", facts=facts))
    with pytest.raises(ArtifactError, match="hidden_size is .*, the target's 99"):
        to_speculators(tmp_path / "zlab", tmp_path / "out", other)
    weights = load_file(tmp_path / "speculators" / WEIGHTS)
    save_file(weights, tmp_path / "speculators" / WEIGHTS, metadata=METADATA)
    with pytest.raises(ArtifactError, match="does not say how many layers the target has; give it: --target-layers"):
        to_zlab(tmp_path / "speculators", tmp_path / "out")
    to_zlab(tmp_path / "speculators", tmp_path / "out", tiny_drafter().shape.num_target_layers)
    assert read_drafter(tmp_path / "out", torch.float32).shape == tiny_drafter().shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["dflash_config"].update(conv_kernel_size=4), "dflash_config.conv_kernel_size is 4, and"),
        (lambda c: c.update(partial_rotary_factor=0.25), "partial_rotary_factor is 0.25"),
        (lambda c: c.update(rope_scaling={"rope_type": "yarn"}), "rope_scaling.rope_type is .yarn"),
        (lambda c: c.update(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (lambda c: c.pop("hidden_size"), "has no hidden_size"),
        (lambda c: c["dflash_config"].update(mask_token_id=VOCABULARY), "is past the .* embeddings"),
    ],
)
def test_drafters_of_another_kind_are_refused(tmp_path: Path, interface: Interface, change: Any, message: str) -> None:
    write_both(tmp_path, interface)
    edit(tmp_path / "zlab" / CONFIG, change)
    with pytest.raises(ArtifactError, match=message):
        read_drafter(tmp_path / "zlab", torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {"fc.weight": w["fc.weight"].half()}, "fc.weight is in float16"),
        (lambda w: w | {"norm.weight": w["norm.weight"] * float("nan")}, "norm.weight is not finite"),
        (lambda w: w | {"norm.weight": torch.ones(3)}, r"norm.weight is \(3,\), by the config"),
    ],
)
def test_weights_that_cannot_be_drafted_with_are_refused(
    tmp_path: Path, interface: Interface, change: Any, message: str
) -> None:
    write_both(tmp_path, interface)
    path = tmp_path / "zlab" / WEIGHTS
    save_file(change(load_file(path)), path)
    with pytest.raises(ArtifactError, match=message):
        read_drafter(tmp_path / "zlab", torch.float32)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_drafter(tmp_path / "zlab", torch.float32)


def published(layers: int, sliding: list[int], window: int | None, **changes: Any) -> dict[str, Any]:
    """A config as published drafters have it (z-lab's layout; sizes by the model's name)."""
    types = ["sliding_attention" if layer in sliding else "full_attention" for layer in range(layers)]
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "layer_types": types,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        **changes,
    }


PUBLISHED = {
    "Qwen3-8B": published(
        5, [], None, hidden_size=4096, intermediate_size=12_288, vocab_size=151_936, rope_theta=1e6, block_size=16,
        max_position_embeddings=40_960, num_target_layers=36,
        dflash_config={"mask_token_id": 151_669, "target_layer_ids": [1, 9, 17, 25, 33]},
    ),
    "Qwen3.6-27B": published(
        5, [0, 1, 2, 3], 2048, hidden_size=5120, intermediate_size=17_408, vocab_size=248_320, rope_theta=1e7,
        max_position_embeddings=262_144, num_target_layers=64,
        dflash_config={"block_size": 16, "mask_token_id": 248_070, "target_layer_ids": [1, 16, 31, 46, 61]},
    ),
    "Qwen3.5, nested rope": published(
        5, [0, 1, 2, 3], 2048, hidden_size=4096, intermediate_size=12_288, vocab_size=248_320, block_size=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7}, max_position_embeddings=262_144, num_target_layers=32,
        dflash_config={"block_size": 16, "mask_token_id": 248_070, "target_layer_ids": [1, 8, 15, 22, 29]},
    ),
    "Llama-3.1-8B": published(
        5, [], None, hidden_size=4096, intermediate_size=14_336, vocab_size=128_256, rope_theta=5e5, block_size=10,
        max_position_embeddings=131_072, num_target_layers=32,
        dflash_config={"mask_token_id": 128_002, "target_layer_ids": [1, 8, 15, 22, 29]},
    ),
    "gpt-oss-20b": published(
        8, [], None, hidden_size=2880, intermediate_size=7680, vocab_size=201_088, rope_theta=1.5e5, block_size=8,
        max_position_embeddings=131_072, num_target_layers=24,
        dflash_config={"mask_token_id": 200_000, "target_layer_ids": [1, 6, 11, 16, 21]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_written_again_key_by_key(name: str) -> None:
    config = PUBLISHED[name]
    again = zlab_config(shape_from_config(config, Path(CONFIG)))
    for key, value in config.items():
        found = {inner: again[key][inner] for inner in value} if isinstance(value, dict) else again[key]
        assert found == value, key
    assert shape_from_config(again, Path(CONFIG)) == shape_from_config(config, Path(CONFIG))


def test_the_block_behind_a_sample_is_that_of_decoding(interface: Interface, sample: dict[str, torch.Tensor]) -> None:
    drafter = tiny_drafter(2)
    logits = draft_logits(drafter, interface, sample)
    assert logits.shape == (drafter.shape.choice.block_size - 1, VOCABULARY)
    sample = sample | {"target_hidden": sample["target_hidden"].clone()}
    sample["target_hidden"][-1] = 100.0
    assert torch.equal(draft_logits(drafter, interface, sample), logits), "the anchor's own states are not read"
