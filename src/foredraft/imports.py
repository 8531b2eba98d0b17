"""The first-party import graph: what a stage depends on, and so what DVC must watch.

``dvc.yaml`` lists these files for each stage, and the scratch fingerprint of a resumable stage covers them.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"foredraft": ROOT / "src" / "foredraft", "stages": ROOT / "stages"}


def import_closure(script: Path) -> list[Path]:
    """Every first-party file that ``script`` imports, directly or not, itself included, sorted.

    An ``__init__.py`` counts only if it holds code: the ones here hold a docstring or nothing.
    """
    found: set[Path] = set()
    waiting = [script.resolve()]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting.extend(direct_imports(path))
    return sorted(found)


def direct_imports(path: Path) -> set[Path]:
    """First-party files named by the import statements of one file, at any depth of its code."""
    imported: set[Path] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            imported.update(_files_of(name))
    return imported


def _files_of(module: str) -> list[Path]:
    package, *rest = module.split(".")
    if package not in PACKAGES:
        return []
    base = PACKAGES[package].joinpath(*rest)
    candidates = [base.with_suffix(".py"), base / "__init__.py"]
    return [path for path in candidates if path.is_file() and _has_code(path)]


def _has_code(path: Path) -> bool:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in body)
