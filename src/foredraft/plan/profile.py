"""``make profile``: put a ready-made params file in place, without losing anybody's edits."""

import sys
from pathlib import Path

from foredraft.artifacts import write_atomic
from foredraft.imports import ROOT
from foredraft.plan.check import check_params
from foredraft.plan.pipeline import main as synchronise


def use_profile(name: str, root: Path = ROOT) -> None:
    """Copy ``profiles/<name>.yaml`` to ``params.yaml``.

    Raises:
        ValueError: no such profile, or ``params.yaml`` holds edits that are neither a profile's nor committed.
    """
    profiles = {path.stem: path for path in sorted((root / "profiles").glob("*.yaml"))}
    if name not in profiles:
        raise ValueError(f"no profile {name!r}; there are: {', '.join(profiles)} (make profile NAME=...)")
    params = root / "params.yaml"
    known = [path.read_bytes() for path in profiles.values()]
    if params.exists() and params.read_bytes() not in known and _differs_from_commit(params):
        raise ValueError("params.yaml has edits that are not committed: commit them, or git checkout params.yaml")
    check_params(profiles[name])
    write_atomic(params, profiles[name].read_bytes())


def _differs_from_commit(path: Path) -> bool:
    import subprocess

    command = ["git", "-C", str(path.parent), "diff", "--quiet", "HEAD", "--", path.name]
    return subprocess.run(command, capture_output=True).returncode != 0


if __name__ == "__main__":
    try:
        use_profile(sys.argv[1])
    except ValueError as error:
        sys.exit(f"Error: {error}")
    synchronise(check=False)
    print(f"params.yaml: profile {sys.argv[1]}")
