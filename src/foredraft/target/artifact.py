"""The ``target`` artefact, for stages that need its facts and neither torch nor Transformers to read them."""

from pathlib import Path

from foredraft.artifacts import Manifest, open_artifact, require_same_contract
from foredraft.target.config import TargetConfig

RERUN = "dvc repro target"


def open_interface(folder: Path, target: TargetConfig | None = None) -> Manifest:
    """Verify the ``target`` artefact; its manifest holds the facts and the contract.

    Args:
        target: what the artefact must have been made of, where a stage loads the target itself.

    Raises:
        ArtifactError: missing, damaged, or of another target, dtype or thinking mode.
    """
    manifest = open_artifact(folder, "target", RERUN)
    if target is not None:
        wanted = {"target": target.uri, "target_dtype": target.dtype, "thinking": target.thinking}
        require_same_contract(wanted, manifest.contract, folder, RERUN)
    return manifest
