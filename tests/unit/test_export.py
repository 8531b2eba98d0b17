import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from foredraft.artifacts import ArtifactError, Manifest, open_artifact, publish
from foredraft.export.config import ExportConfig
from foredraft.export.export import export
from foredraft.layouts import speculators, transformers, zlab
from foredraft.layouts.speculators import ENDS, speculators_config
from foredraft.layouts.transformers import write_transformers
from foredraft.layouts.zlab import CONFIG, WEIGHTS, as_stored, read_zlab, shape_from_config, write_zlab, zlab_config
from foredraft.sources.config import FetchConfig
from foredraft.target.config import TargetConfig
from foredraft.target.frozen import load_target
from foredraft.target.interface import read_interface, write_interface
from tests.builders import keep_interface, make_interface, tiny_frozen
from tests.conftest import DENSE, HIDDEN, LINEAR, TAPS, VOCABULARY, tiny_drafter, tiny_shape
from tests.tokenizers import make_tokenizer

SLIDING = {"sliding_window": 16, "full_attention_layers": (1,)}


@pytest.mark.parametrize("changes", [{}, SLIDING])
def test_a_written_drafter_reads_back_equal(tmp_path: Path, changes: dict[str, object]) -> None:
    drafter = tiny_drafter(**changes)
    write_zlab(tmp_path / "z", drafter.shape, as_stored(drafter.state_dict()), {"format": "pt"})
    again = read_zlab(tmp_path / "z", torch.bfloat16)
    assert again.shape == drafter.shape
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.to(torch.bfloat16))


def test_every_reader_finds_its_key() -> None:
    config = zlab_config(tiny_shape(**SLIDING))
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e4
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert config["dflash_config"] == {"block_size": 4, "mask_token_id": 5, "target_layer_ids": list(TAPS)}
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert (config["sliding_window"], config["use_sliding_window"]) == (16, True)
    assert not {"partial_rotary_factor", "mrope_section"} & config.keys()


def test_speculators_count_taps_from_the_embeddings_and_drafts_without_the_anchor() -> None:
    config = speculators_config(tiny_shape(), "hf:org/target@1", "LlamaForCausalLM")
    assert config["aux_hidden_state_layer_ids"] == [layer_id + 1 for layer_id in TAPS]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["block_size"] == 4
    assert config["sample_from_anchor"] is False
    assert "model_type" not in config


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"block_size": 8}, r"two values of block_size: \[8, 4\]"),
        ({"rope_theta": 1e6}, r"two values of rope_theta"),
        ({"dflash_config": {"block_size": 4, "mask_token_id": 5}}, "has no target_layer_ids"),
    ],
)
def test_conflicting_or_missing_keys_are_refused(edit: dict[str, object], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        shape_from_config({**zlab_config(tiny_shape()), **edit}, Path("config.json"))


def test_a_config_with_only_the_flat_or_only_the_nested_form_is_read() -> None:
    config = zlab_config(tiny_shape())
    for key in ("rope_theta", "rope_parameters", "block_size"):
        assert shape_from_config({k: v for k, v in config.items() if k != key}, Path("c")) == tiny_shape()


def test_missing_and_extra_tensors_are_refused(tmp_path: Path) -> None:
    drafter = tiny_drafter()
    write_zlab(tmp_path / "z", drafter.shape, drafter.state_dict(), {"format": "pt"})
    tensors = load_file(tmp_path / "z" / WEIGHTS)
    save_file(
        {name: t for name, t in tensors.items() if name != "fc.weight"} | {"x": torch.ones(1)}, tmp_path / "z" / WEIGHTS
    )
    with pytest.raises(ArtifactError, match=r"missing tensors \['fc.weight'\], unknown tensors \['x'\]"):
        read_zlab(tmp_path / "z", torch.float32)


def test_transposed_views_are_saved(tmp_path: Path) -> None:
    drafter = tiny_drafter()
    weights = drafter.state_dict()
    weights["fc.weight"] = weights["fc.weight"].T.contiguous().T
    write_zlab(tmp_path / "z", drafter.shape, as_stored(weights), {"format": "pt"})
    assert read_zlab(tmp_path / "z", torch.float32)
    assert json.loads((tmp_path / "z" / CONFIG).read_text())["dtype"] == "bfloat16"


def test_a_layout_that_cannot_say_it_is_refused(tmp_path: Path) -> None:
    drafter = tiny_drafter(**SLIDING)
    with pytest.raises(ValueError, match="this drafter's are causal; leave that layout out"):
        write_transformers(tmp_path / "t", drafter.shape, drafter.state_dict(), {}, {"format": "pt"})


CONTRACT = {
    "target": "hf:org/target@1",
    "target_digest": "d",
    "target_layer_ids": list(TAPS),
    "layer_id_convention": "after block",
    "thinking": False,
}
WORDED = DENSE | {"vocab_size": 768, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
UNTIED = {"tie_word_embeddings": False}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16}
FACTS = {"num_layers": 4, "architecture": "LlamaForCausalLM", "tokenizer_size": VOCABULARY - 3}


def trained_drafter(folder: Path, taps: tuple[int, ...] = TAPS, **changes: Any) -> tuple[Path, Path]:
    """What ``train`` and ``target`` leave behind: a drafter's artefact, and that of a target padded past its tokenizer."""
    drafter, interface = tiny_drafter(4, **changes), make_interface(tiny_frozen())
    choice = drafter.shape.choice
    contract = CONTRACT | {"block_size": choice.block_size, "mask_token_id": choice.mask_token_id}
    interface.manifest.contract.update({key: CONTRACT[key] for key in ("target", "target_digest", "thinking")})
    interface.manifest.facts.update(FACTS)
    keep_interface(interface, folder / "target")
    facts = {"best": {"step": 1, "tokens_per_step": 1.5}}
    with publish(folder / "drafter", Manifest("drafter", contract=contract, facts=facts)) as building:
        save_file(drafter.state_dict(), building / "drafter.safetensors")
        shape = drafter.shape.model_copy(update={"target_layer_ids": taps})
        (building / "shape.json").write_text(shape.model_dump_json())
        states = torch.randn(20, len(TAPS), HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
        save_file({"input_ids": torch.arange(20), "target_hidden": states}, building / "sample.safetensors")
    return folder / "drafter", folder / "target"


def test_all_layouts_are_written_of_a_tied_and_padded_target(tmp_path: Path) -> None:
    drafter, target = trained_drafter(tmp_path)
    export(ExportConfig(layouts=("speculators", "transformers")), drafter, target, tmp_path / "out")
    manifest = open_artifact(tmp_path / "out", "export", "x")
    assert {name.partition("/")[0] for name in manifest.files} == {"zlab", "speculators", "transformers"}
    config = json.loads((tmp_path / "out/speculators" / CONFIG).read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert config["draft_vocab_size"] == VOCABULARY == config["transformer_layer_config"]["vocab_size"]
    weights = load_file(tmp_path / "out/speculators" / WEIGHTS)
    assert torch.equal(weights["embed_tokens.weight"], weights["lm_head.weight"])


def test_a_head_of_its_own_travels_with_the_drafter(tmp_path: Path) -> None:
    drafter, target = trained_drafter(tmp_path)
    interface = read_interface(target)
    head = torch.randn_like(interface.lm_head)
    manifest = Manifest(
        "target", contract=interface.manifest.contract, facts=interface.manifest.facts | {"tied": False}
    )
    with publish(tmp_path / "untied", manifest) as building:
        weights = {"embed_tokens.weight": interface.embed_tokens, "norm.weight": interface.norm, "lm_head.weight": head}
        save_file(weights, building / "interface.safetensors")
        save_file(interface.layers, building / "layers.safetensors")
    export(ExportConfig(layouts=("speculators",)), drafter, tmp_path / "untied", tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out/speculators" / WEIGHTS)["lm_head.weight"], head.bfloat16())


MODELS: dict[str, Callable[[], Any]] = {
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**WORDED, tie_word_embeddings=True)),
    "untied": lambda: LlamaForCausalLM(LlamaConfig(**WORDED | UNTIED)),
    "vision wrapper": lambda: Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=LINEAR | WORDED | UNTIED, vision_config=VISION, **UNTIED)
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpoint_is_kept_by_the_target_stage_and_exported_to(tmp_path: Path, kind: str) -> None:
    """From a folder that Transformers saved, padded past its tokenizer, to the files engines read."""
    torch.manual_seed(0)
    model, tokenizer = MODELS[kind](), make_tokenizer("chatml")
    model.save_pretrained(tmp_path / "checkpoint")
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    stored = load_file(tmp_path / "checkpoint/model.safetensors")
    names = {name for name in stored if name.endswith(("lm_head.weight", "embed_tokens.weight"))}
    assert (len(names) == 1) == (kind == "tied")
    assert any(name.startswith("model.language_model.") for name in names) == (kind == "vision wrapper")

    config = TargetConfig(uri=f"file:{tmp_path / 'checkpoint'}", dtype="float32", thinking=False, kept_layers=1)
    write_interface(config, FetchConfig(stall_seconds=1, retries=0), tmp_path / "target")
    interface = read_interface(tmp_path / "target")
    facts = interface.manifest.facts
    assert facts["tokenizer_size"] < facts["vocab_rows"] == WORDED["vocab_size"]
    assert facts["tied"] == (kind == "tied")
    assert torch.equal(interface.lm_head, model.get_output_embeddings().weight)

    mask = facts["tokenizer_size"]  # a row that no word has
    drafter = tiny_drafter(1, mask_token_id=mask)
    shape = drafter.shape.model_copy(update={"vocab_rows": facts["vocab_rows"]})
    contract = interface.manifest.contract | {
        "target_layer_ids": list(TAPS),
        "layer_id_convention": "after block",
        "block_size": 4,
        "mask_token_id": mask,
    }
    with publish(tmp_path / "drafter", Manifest("drafter", contract=contract, facts={"best": {}})) as building:
        save_file(drafter.state_dict(), building / "drafter.safetensors")
        (building / "shape.json").write_text(shape.model_dump_json())
        ids = torch.arange(20)
        target = load_target(tmp_path / "checkpoint", config, TAPS, "cpu")
        with torch.inference_mode():
            states, _ = target.read(ids[None])
        save_file({"input_ids": ids, "target_hidden": states[0].bfloat16()}, building / "sample.safetensors")
    layouts = ("zlab", "speculators", "transformers")
    export(ExportConfig(layouts=layouts), tmp_path / "drafter", tmp_path / "target", tmp_path / "out")
    written = load_file(tmp_path / "out/speculators" / WEIGHTS)
    assert torch.equal(written["lm_head.weight"], interface.lm_head.bfloat16())
    assert torch.equal(written["embed_tokens.weight"], interface.embed_tokens.bfloat16())


@pytest.mark.parametrize("mask_token_id", [0, 1])
def test_a_mask_token_that_means_something_is_refused(tmp_path: Path, mask_token_id: int) -> None:
    drafter, target = trained_drafter(tmp_path, mask_token_id=mask_token_id)
    with pytest.raises(
        ValueError, match=f"mask_token_id = {mask_token_id}: that is the target's end-of-turn or padding"
    ):
        export(ExportConfig(layouts=("zlab",)), drafter, target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("writer", "changes", "message"),
    [
        (zlab, {"num_target_layers": 64}, "reads back as"),
        (zlab, {"max_window_layers": 0}, "max_window_layers is 0"),
        (zlab, {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        (speculators, {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        (speculators, {"sliding_window_non_causal": True}, "sliding_window_non_causal is True"),
        (transformers, {"mask_token_id": 9}, "mask_token_id is 9, expected 5"),
        (transformers, {"target_layer_ids": [1, 2]}, r"target_layer_ids is \[1, 2\], expected \[0, 2\]"),
        (transformers, {"block_size": 8}, "block_size is 8, expected 4"),
        (transformers, {"eos_token_id": 7}, "eos_token_id is 7, expected 1"),
    ],
)
def test_a_config_that_says_something_else_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Any, changes: dict[str, Any], message: str
) -> None:
    name = f"{writer.__name__.rpartition('.')[2]}_config"
    written = getattr(writer, name)
    monkeypatch.setattr(writer, name, lambda *given: written(*given) | changes)
    drafter, target = trained_drafter(tmp_path)
    with pytest.raises(ArtifactError, match=message):
        export(ExportConfig(layouts=("speculators", "transformers")), drafter, target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("end", [0, 1])
def test_embeddings_or_a_head_that_are_not_the_targets_are_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: int
) -> None:
    saved = speculators.save_weights

    def other(weights: dict[str, torch.Tensor], *rest: Any) -> None:
        saved(weights | {ENDS[end]: weights[ENDS[end]] * 3}, *rest)

    monkeypatch.setattr(speculators, "save_weights", other)
    drafter, target = trained_drafter(tmp_path)
    with pytest.raises(ArtifactError, match=f"{ENDS[end]} is not the target's"):
        export(ExportConfig(layouts=("speculators",)), drafter, target, tmp_path / "out")


def test_a_tap_on_the_last_block_is_refused(tmp_path: Path) -> None:
    drafter, target = trained_drafter(tmp_path, taps=(0, 3))
    with pytest.raises(ValueError, match="^extract.target_layer_ids: 3 is the target's last block"):
        export(ExportConfig(layouts=("zlab",)), drafter, target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_equal_drafters_are_exported_as_equal_bytes(tmp_path: Path) -> None:
    drafter, target = trained_drafter(tmp_path)
    for name in ("one", "two"):
        export(ExportConfig(layouts=("speculators",)), drafter, target, tmp_path / name)
    assert len({open_artifact(tmp_path / name, "export", "x").fingerprint for name in ("one", "two")}) == 1


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    drafter, _ = trained_drafter(tmp_path)
    interface = make_interface(tiny_frozen())
    interface.manifest.contract["target_digest"] = "other"
    keep_interface(interface, tmp_path / "other")
    with pytest.raises(ArtifactError, match="contract: expected target_digest = 'other', found 'd'"):
        export(ExportConfig(layouts=("zlab",)), drafter, tmp_path / "other", tmp_path / "out")
