"""One drafter in every layout: read by every engine's keys, converted there and back, refused where it is not ours."""

import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from foredraft.artifacts import ArtifactError, Manifest
from foredraft.drafter.config import DrafterShape
from foredraft.drafter.model import Drafter
from foredraft.export.check import check_layouts, draft_logits
from foredraft.layouts.convert import main, to_speculators, to_zlab
from foredraft.layouts.names import served_name
from foredraft.layouts.read import read_drafter
from foredraft.layouts.speculators import ENDS, shape_from_speculators, speculators_config, write_speculators
from foredraft.layouts.zlab import (
    CONFIG,
    METADATA,
    WEIGHTS,
    as_stored,
    save_weights,
    shape_from_config,
    write_zlab,
    zlab_config,
)
from foredraft.target.interface import Interface
from tests.builders import keep_interface, make_interface, tiny_frozen
from tests.conftest import HIDDEN, TAPS, VOCABULARY, tiny_drafter, tiny_shape

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
        assert (tmp_path / first / WEIGHTS).read_bytes() == (tmp_path / last / WEIGHTS).read_bytes()
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


def test_a_drafter_that_was_exported_for_another_target_is_not_converted(tmp_path: Path, interface: Interface) -> None:
    contract = interface.manifest.contract | {"target_digest": "mine"}
    known = replace(interface, manifest=Manifest("target", facts=interface.manifest.facts, contract=contract))
    drafter = tiny_drafter(7)
    for digest, told in (("mine", None), ("other", "target_digest is other, the target's mine")):
        metadata = METADATA | {"foredraft": json.dumps({"target_digest": digest})}
        write_zlab(tmp_path / digest, drafter.shape, drafter.state_dict(), metadata)
        with pytest.raises(ArtifactError, match=told) if told else nullcontext():
            to_speculators(tmp_path / digest, tmp_path / f"{digest}-out", known)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {ENDS[1]: w[ENDS[1]] * 2}, "a head of its own, .*: lm_head.weight is not the target's"),
        (lambda w: w | {ENDS[0]: w[ENDS[0]] * 2}, "a head of its own, .*: embed_tokens.weight is not the target's"),
        (lambda w: w | {ENDS[1]: w[ENDS[1]] * float("inf")}, "lm_head.weight is not finite"),
        (lambda w: w | {ENDS[1]: w[ENDS[1]][:8].clone()}, r"lm_head.weight is \(8, 16\), by the config \(64, 16\)"),
        (lambda w: {name: tensor for name, tensor in w.items() if name not in ENDS}, None),
    ],
)
def test_a_head_of_its_own_is_not_dropped(
    tmp_path: Path, interface: Interface, change: Any, message: str | None
) -> None:
    write_both(tmp_path, interface)
    path = tmp_path / "speculators" / WEIGHTS
    save_file(change(load_file(path)), path, metadata=METADATA | {"num_target_layers": "4"})
    with pytest.raises(ArtifactError, match=message) if message else nullcontext():
        to_zlab(tmp_path / "speculators", tmp_path / "out", interface=interface)


@pytest.mark.parametrize(
    ("layout", "layers", "message"),
    [
        ("speculators", 8, "num_target_layers is 4 in its metadata, and the target has 8 .--target-layers."),
        ("zlab", 4, "num_target_layers is 4 there; leave --target-layers 4 out"),
        ("foreign", 2, "aux_hidden_state_layer_ids is .* numbered 1 to 2"),
        ("foreign", 3, "taps the target's last block, 2"),
    ],
)
def test_a_depth_that_cannot_be_is_refused_and_leaves_nothing(
    tmp_path: Path, interface: Interface, layout: str, layers: int, message: str
) -> None:
    write_both(tmp_path, interface)
    shutil.copytree(tmp_path / "speculators", tmp_path / "foreign", copy_function=shutil.copyfile)
    save_file(load_file(tmp_path / "foreign" / WEIGHTS), tmp_path / "foreign" / WEIGHTS, metadata=METADATA)
    arguments = [str(tmp_path / layout), str(tmp_path / "new/er/out"), "--target-layers", str(layers)]
    told = CliRunner().invoke(main, arguments)
    assert told.exit_code == 1 and len(told.output.splitlines()) == 1
    assert re.search(message, told.output)
    assert {path.name for path in tmp_path.iterdir()} == {"zlab", "speculators", "foreign"}


DFLASH, LAYERS, PROPOSALS = "dflash_config", "transformer_layer_config", "speculators_config"


def read_changed(layout: str, where: str, changes: dict[str, Any], **shape: Any) -> DrafterShape:
    """The shape that a layout's config describes once ``changes`` are made at the top, or in the section ``where``."""
    drafter = tiny_shape(**shape)
    config = zlab_config(drafter) if layout == "zlab" else speculators_config(drafter, *TARGET)
    (config[where] if where else config).update(changes)
    if layout == "zlab":
        return shape_from_config(config, Path("folder") / CONFIG)
    return shape_from_speculators(config, Path("folder"), drafter.num_target_layers)


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    *(("zlab", "", {key: value}) for key, value in {
        "is_causal": True, "is_neox_style": False, "logit_scale": 0.5, "draft_vocab_size": 32, "target_hidden_size": 8,
        "conv_kernel_size": 2, "selector_rank": 256, "architectures": ["DFlash2DraftModel"], "model_type": "llama",
        "markov_rank": 256, "add_swa_attention_sink_bias": True, "use_aux_hidden_state": False, "num_target_layers": 2.0,
        "use_sliding_window": 1, "dflash_config": [1], "target_layer_ids": 5, "rope_theta": "1e4", "layer_types": [[], []],
    }.items()),
    *(("zlab", DFLASH, {key: value}) for key, value in {
        "causal": True, "use_swa": True, "swa_window_size": 128, "attention_sink_bias": True, "use_aux_hidden_state": False,
        "projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 2, "output_multiplier": 0.5,
        "input_embedding_scale": 33.9, "final_logit_softcapping": 30.0, "draft_vocab_size": 32, "markov_rank": 64,
        "conv_kernel_size": 4, "unheard_of": 1, "target_layer_ids": [0, 4], "mask_token_id": VOCABULARY,
    }.items()),
    *((layout, where, {key: value}) for layout, where in (("zlab", ""), ("speculators", LAYERS)) for key, value in {
        "hidden_act": "gelu", "attention_bias": True, "mlp_bias": True, "rotary_dim": 4, "partial_rotary_factor": 0.25,
        "rope_scaling": {"rope_type": "yarn"}, "rope_parameters": {"type": "yarn", "rope_theta": 1e4},
        "quantization_config": {"quant_method": "fp8"}, "final_logit_softcapping": 30.0, "unheard_of": False,
        "hidden_size": "a", "vocab_size": "64", "num_hidden_layers": 2.0, "rms_norm_eps": float("nan"),
        "head_dim": None, "num_attention_heads": 0, "num_key_value_heads": True, "layer_types": ["full_attention"],
        "max_position_embeddings": -1, "intermediate_size": 2**40,
    }.items()),
    *(("speculators", "", {key: value}) for key, value in {
        "speculators_model_type": "eagle3", "sample_from_anchor": True, "draft_vocab_size": 32, "target_hidden_size": 8,
        "block_size": 8, "markov_rank": 64, "architectures": "DFlashDraftModel", "norm_before_fc": True,
        "aux_hidden_state_layer_ids": [0, 3], "mask_token_id": -1, "transformer_layer_config": "qwen3",
    }.items()),
    *(("speculators", PROPOSALS, {key: value}) for key, value in {
        "algorithm": "eagle3", "proposal_methods": 3, "verifier": ["org/target"], "unheard_of": 1,
    }.items()),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "where", "changes"), REFUSED, ids=str)
def test_what_another_drafter_says_is_refused_in_one_line_by_key(
    layout: str, where: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ArtifactError) as refusal:
        read_changed(layout, where, changes)
    message = str(refusal.value)
    assert message.startswith(f"folder/{CONFIG}: ") and "\n" not in message
    assert next(iter(changes)) in message


@pytest.mark.parametrize(
    ("layout", "where", "changes", "message"),
    [
        ("zlab", "", {"rope_parameters": {"type": "linear"}}, "rope_parameters.type is 'linear'"),
        ("zlab", "", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention"),
        ("zlab", "", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
        ("zlab", "", {"rope_parameters": None, "rope_theta": -5.0}, "rope_theta is -5.0"),
        ("zlab", "", {"block_size": 1, DFLASH: {"mask_token_id": 5, "target_layer_ids": [0]}}, "block_size is 1: "),
        ("zlab", "", {"num_key_value_heads": 3}, "num_attention_heads = 2 is no multiple of num_key_value_heads = 3"),
        ("zlab", DFLASH, {"target_layer_ids": [1, 1]}, "different layers of the target, numbered 0 to 3"),
        ("speculators", "", {"aux_hidden_state_layer_ids": [1, 5]}, "different layers of the target, numbered 1 to 4"),
    ],
)
def test_a_refusal_says_what_is_wrong(layout: str, where: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        read_changed(layout, where, changes)


@pytest.mark.parametrize(
    ("layout", "where", "changes"),
    [
        ("zlab", DFLASH, {"causal": False}),
        ("zlab", "", {"is_causal": False}),
        ("speculators", "", {"sliding_window_non_causal": True}),
    ],
)
def test_sliding_layers_that_see_a_block_both_ways_are_refused(
    layout: str, where: str, changes: dict[str, Any]
) -> None:
    assert read_changed(layout, where, changes) == tiny_shape()
    with pytest.raises(ArtifactError, match=next(iter(changes))):
        read_changed(layout, where, changes, **WINDOW)


@pytest.mark.parametrize("where", ["", DFLASH])
def test_what_says_nothing_new_is_read(where: str) -> None:
    for changes in (
        {"unheard_of": None},
        {"unheard_of": {}},
        {"use_aux_hidden_state": True},
        {"output_multiplier": 1.0},
    ):
        assert read_changed("zlab", where, changes) == tiny_shape()
    for rope in ({}, {"rope_type": "default"}, {"type": "default", "rope_theta": 1e4}):
        assert read_changed("zlab", "", {"rope_scaling": rope}) == tiny_shape()
    assert read_changed("zlab", "", Qwen3Config(**zlab_config(tiny_shape())).to_dict()) == tiny_shape()


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": types, "sliding_window": 16, "use_sliding_window": used, "max_window_layers": first}
        for used in (True, False)
        for first in (0, 1, 2)
        for types in (None, ["full_attention"] * 2)
    ]
    + [
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16, "use_sliding_window": True},
        {"layer_types": None, "sliding_window": None, "use_sliding_window": True, "max_window_layers": 0},
    ],
    ids=str,
)
def test_windows_are_those_of_transformers_own_config(changes: dict[str, Any]) -> None:
    shape, theirs = read_changed("zlab", "", changes), Qwen3Config(**zlab_config(tiny_shape()) | changes)
    assert list(shape.choice.layer_types) == theirs.layer_types
    assert shape.choice.sliding_window == (theirs.sliding_window if "sliding_attention" in theirs.layer_types else None)


def test_windows_that_one_key_switches_on_and_another_off_are_refused() -> None:
    with pytest.raises(ArtifactError, match="layer_types has sliding layers, and use_sliding_window"):
        read_changed("zlab", "", {"use_sliding_window": False}, **WINDOW)


@pytest.mark.parametrize("content", ["[]", "null", '"speculators_model_type"', "3", "{", ""])
def test_a_config_that_is_no_mapping_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / CONFIG).write_text(content)
    with pytest.raises(ArtifactError, match=f"{CONFIG}: (expected a mapping|is not JSON)"):
        read_drafter(tmp_path, torch.float32)


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:1000])


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, f"{WEIGHTS}: cannot be read"),
        (lambda folder: (folder / WEIGHTS).unlink(), f"{WEIGHTS}: cannot be read"),
        (lambda folder: (folder / f"{WEIGHTS}.index.json").write_text("{}"), "is sharded .*; put it into one"),
    ],
)
def test_weights_that_are_not_there_as_one_file_are_refused(
    tmp_path: Path, interface: Interface, layout: str, change: Any, message: str
) -> None:
    write_both(tmp_path, interface)
    change(tmp_path / layout)
    with pytest.raises(ArtifactError, match=message):
        read_drafter(tmp_path / layout, torch.float32)


def test_equal_weights_are_equal_bytes_that_others_may_read(tmp_path: Path) -> None:
    weights = as_stored(tiny_drafter().state_dict())
    metadata = {f"key {number}": f'"{number}" \\ ü\n' for number in range(6)}
    for number in range(6):
        (tmp_path / str(number)).mkdir()
        save_weights(weights, tmp_path / str(number), metadata)
    first, *others = (tmp_path / str(number) / WEIGHTS for number in range(6))
    assert {path.read_bytes() for path in others} == {first.read_bytes()}
    found = load_file(first)
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
    with safe_open(first, "pt") as stored:
        assert stored.metadata() == metadata
    (tmp_path / "other").touch()
    assert first.stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("hf:org/target@1", "org/target"),
        ("file:x/y", "x/y"),
        ("file:/home/me/x", "/home/me/x"),
        ("file:///home/me/x", "/home/me/x"),
    ],
)
def test_engines_call_a_target_by_name_or_folder(uri: str, name: str) -> None:
    assert served_name(uri) == name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {"fc.weight": w["fc.weight"].half()}, "fc.weight is in float16"),
        (lambda w: w | {"fc.weight": w["fc.weight"].double()}, "fc.weight is in float64"),
        (lambda w: w | {"fc.weight": w["fc.weight"].to(torch.float8_e4m3fn)}, "fc.weight is in float8_e4m3fn"),
        (lambda w: w | {"fc.weight": w["fc.weight"].to(torch.int8)}, "fc.weight is in int8"),
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
