"""What every stage script shares: the params option, one clear line for a user's fault, and the record of the run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from foredraft.artifacts import ArtifactError
from foredraft.provenance import recorded

EXISTING = click.Path(path_type=Path)


class _StageCommand(click.Command):
    def invoke(self, ctx: click.Context) -> Any:
        name = "-".join([str(self.name), *filter(None, [ctx.params.get("source")])])
        try:
            with recorded(name):
                return super().invoke(ctx)
        except (ValueError, ArtifactError) as error:
            raise click.ClickException(f"{name}: {error}") from error


def stage_command(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """Make a function the command of stage ``name``; it receives ``params``, the path of ``params.yaml``.

    ``ValueError`` and ``ArtifactError`` end the command with their message and exit code 1; anything else is our own
    bug and keeps its traceback.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        params = click.option("--params", type=EXISTING, default=Path("params.yaml"), show_default=True, help="Knobs.")
        return click.command(name, cls=_StageCommand)(params(function))

    return decorate


def folder_option(flag: str, help_text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A required option that takes a path; paths come from ``dvc.yaml``, never from params."""
    return click.option(flag, type=EXISTING, required=True, help=help_text)
