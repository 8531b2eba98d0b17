"""The shape of the house: stages, params, dvc.yaml and imports hold each other."""

import ast
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from foredraft.imports import ROOT, direct_imports, import_closure
from foredraft.params import read_params
from foredraft.plan.check import SECTIONS, SOURCES
from foredraft.plan.pipeline import synchronised

STAGES = [
    "target",
    "fetch",
    "benchmarks",
    "curate",
    "respond",
    "prepare",
    "extract",
    "train",
    "export",
    "evaluate",
    "card",
]
LIGHT_STAGES = ["fetch", "benchmarks", "curate", "card"]
MODULES = sorted(path for path in (ROOT / "src").rglob("*.py"))
# From the ground up: a folder imports from those before it, and from itself.
LAYERS = [
    "imports params accounts workers devices loops",
    "artifacts",
    "scratch provenance",
    "command progress launch",
    "sources",
    "conversations",
    "benchmarks",
    "chat",
    "target",
    "responses",
    "tokens",
    "features",
    "drafter",
    "layouts",
    "training export",
    "speculation",
    "plan",
]


def pipeline() -> dict[str, Any]:
    return YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"]


def test_stage_script_and_params_section_share_their_word() -> None:
    scripts = {path.stem for path in (ROOT / "stages").glob("*.py")} - {"__init__"}
    assert set(STAGES) == scripts == set(pipeline()) == set(SECTIONS)
    for path in (ROOT / "profiles").glob("*.yaml"):
        assert set(read_params(path)) == {*STAGES, SOURCES}
    for word, stage in pipeline().items():
        assert f"python -m stages.{word}" in stage["cmd"]
        assert stage["cmd"].startswith("exec "), "a signal must reach the script itself"
        assert word in stage["params"]


@pytest.mark.parametrize("word", STAGES)
def test_a_stage_depends_on_exactly_the_code_that_it_imports(word: str) -> None:
    listed = {dep for dep in pipeline()[word]["deps"] if dep.endswith(".py")}
    assert listed == {str(path.relative_to(ROOT)) for path in import_closure(ROOT / "stages" / f"{word}.py")}


def test_train_depends_on_every_source_and_on_no_parent_folder() -> None:
    sources = read_params(ROOT / "params.yaml")[SOURCES]
    features = {dep for dep in pipeline()["train"]["deps"] if dep.startswith("data/features")}
    assert features == {f"data/features/{source}" for source in sources}


def test_the_generated_blocks_are_in_step_and_follow_a_new_source() -> None:
    text = (ROOT / "dvc.yaml").read_text()
    sources = list(read_params(ROOT / "params.yaml")[SOURCES])
    assert synchronised(text, sources) == text
    assert "    - data/features/math\n" in synchronised(text, [*sources, "math"])


def test_imports_point_towards_the_ground() -> None:
    rank = {word: number for number, layer in enumerate(LAYERS) for word in layer.split()}
    for path in MODULES:
        here = part_of(path)
        for imported in direct_imports(path):
            there = part_of(imported)
            if there != here:
                assert rank[there] < rank[here], f"{path.relative_to(ROOT)} imports {imported.relative_to(ROOT)}"


def test_there_are_no_cycles() -> None:
    done: set[Path] = set()

    def visit(path: Path, above: tuple[Path, ...]) -> None:
        if path in above:
            cycle = [step.stem for step in (*above[above.index(path) :], path)]
            raise AssertionError(" -> ".join(cycle))
        if path not in done:
            for imported in direct_imports(path) - {path}:
                visit(imported, (*above, path))
            done.add(path)

    for path in MODULES:
        visit(path, ())


def test_imports_are_absolute_and_inits_hold_no_code() -> None:
    for path in MODULES:
        tree = ast.parse(path.read_text())
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
        if path.name == "__init__.py":
            assert all(isinstance(node, ast.Expr) for node in tree.body), path


def test_the_drafter_opens_no_file_and_extraction_reaches_no_training() -> None:
    drafter = [path for path in MODULES if part_of(path) == "drafter"]
    for path in drafter:
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert not names & {"open", "Path", "load_file", "save_file"}, path
    reached = {part_of(path) for path in import_closure(ROOT / "stages" / "extract.py") if "stages" not in path.parts}
    assert not reached & {"drafter", "training", "export", "speculation", "conversations"}
    served = {part_of(path) for path in import_closure(ROOT / "stages" / "train.py") if "stages" not in path.parts}
    assert not served & {"conversations", "responses", "speculation", "export"}


@pytest.mark.parametrize("word", LIGHT_STAGES)
def test_light_stages_import_nothing_heavy_and_show_their_help(word: str) -> None:
    """What would make ``--help`` slow is known by name, so nothing is timed."""
    heavy = "{'torch', 'transformers', 'datasets', 'pandas', 'dvc', 'huggingface_hub'}"
    code = f"import sys, stages.{word}; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"
    help_text = [sys.executable, "-m", f"stages.{word}", "--help"]
    assert "Usage:" in subprocess.run(help_text, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_params_check_needs_no_torch() -> None:
    code = "import sys, foredraft.plan.check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "src").returncode == 0


def test_stage_scripts_only_wire() -> None:
    for path in (ROOT / "stages").glob("*.py"):
        tree = ast.parse(path.read_text())
        kinds = (ast.For, ast.While, ast.Try)
        assert not [node for node in ast.walk(tree) if isinstance(node, kinds)], path
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
            assert len(function.body) <= 10, path


def test_make_alone_prints_the_verbs() -> None:
    shown = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for verb in ("repro", "test", "check", "sources", "profile", "accept"):
        assert f"make {verb} " in shown


def test_no_secret_is_in_a_tracked_file() -> None:
    import re

    secret = re.compile(r"hf_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{30,}")
    names = ["params.yaml", "dvc.yaml", "dvc.lock", ".dvc/config", *map(str, (ROOT / "profiles").glob("*.yaml"))]
    for path in (ROOT / name for name in names):
        assert not path.exists() or not secret.search(path.read_text()), path


def part_of(path: Path) -> str:
    """The folder, or for a module at the top its own name."""
    inside = path.relative_to(ROOT / "src" / "foredraft")
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def test_layers_name_every_part_once() -> None:
    words = [word for layer in LAYERS for word in layer.split()]
    assert sorted(words) == sorted({part_of(path) for path in MODULES} - {"__init__"})
    assert all(a != b for a, b in pairwise(sorted(words)))
