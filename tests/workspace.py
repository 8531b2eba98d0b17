"""A copy of the repository to run pipelines in, with its own git history, cache, remote and scratch."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from foredraft.scratch import scratch_root
from tests.conftest import ROOT


@dataclass(frozen=True)
class Workspace:
    """A checkout and the environment that its commands run in."""

    path: Path
    scratch: Path
    variables: dict[str, str] = field(default_factory=dict)

    def run(self, *command: str, fails: bool = False, **variables: str) -> str:
        """Run a command there; its output, both streams. Fails the test if its exit code is not as expected."""
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.path / "src"),
            "FOREDRAFT_SCRATCH": str(self.scratch),
            "DVC_NO_ANALYTICS": "1",
            **self.variables,
            **variables,
        }
        done = subprocess.run(
            command, cwd=self.path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert (done.returncode != 0) == fails, f"{' '.join(command)}: exit {done.returncode}\n{done.stdout[-4000:]}"
        return done.stdout

    def repro(self, *arguments: str, fails: bool = False) -> list[str]:
        """``dvc repro``; the stages that it ran, in order."""
        return ran(self.run("dvc", "repro", *arguments, fails=fails))

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace the first ``old`` in a file."""
        path = self.path / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    def commit(self, message: str) -> None:
        """Commit everything that git does not ignore."""
        self.run("git", "add", "-A")
        self.run("git", "commit", "-q", "--allow-empty", "-m", message)


def ran(output: str) -> list[str]:
    """Names of the stages that DVC ran, from its output."""
    return re.findall(r"^Running stage '([^']+)'", output, flags=re.MULTILINE)


def copy_repository(folder: Path, profile: str, **variables: str) -> Workspace:
    """Copy what git tracks or would track, under a profile. Wheels and the converted target are shared."""
    path, scratch = folder / "project", folder / "scratch"
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and name not in {"dvc.lock"} and not name.startswith("metrics/"):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, path / name)
    scratch.mkdir()
    for shared in ("wheels", "targets"):
        (scratch_root() / shared).mkdir(parents=True, exist_ok=True)
        (scratch / shared).symlink_to(scratch_root() / shared)
    workspace = Workspace(path, scratch, variables)
    workspace.run("git", "init", "-q", "-b", "main")
    for key, value in {"user.name": "Test", "user.email": "test@example.org", "gc.auto": "0"}.items():
        workspace.run("git", "config", key, value)
    workspace.run(sys.executable, "-m", "foredraft.plan.profile", profile)
    workspace.commit(f"profile {profile}")
    return workspace
