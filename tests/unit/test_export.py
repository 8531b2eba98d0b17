import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.artifacts import ArtifactError
from foredraft.layouts.speculators import speculators_config
from foredraft.layouts.transformers import write_transformers
from foredraft.layouts.zlab import CONFIG, WEIGHTS, as_stored, read_zlab, shape_from_config, write_zlab, zlab_config
from tests.conftest import TAPS, tiny_drafter, tiny_shape

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
