"""The ``target`` artefact, for stages that need its facts and neither torch nor Transformers to read them."""

from pathlib import Path

from foredraft.artifacts import Manifest, open_artifact


def open_interface(folder: Path) -> Manifest:
    """Verify the ``target`` artefact; its manifest holds the facts and the contract."""
    return open_artifact(folder, "target", "dvc repro target")
