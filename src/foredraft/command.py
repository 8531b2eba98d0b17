"""What every stage script shares: the params option, one clear line for a user's fault, and the record of the run."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from safetensors import SafetensorError

from foredraft.artifacts import ArtifactError, require_replaceable
from foredraft.params import SOURCE_NAME
from foredraft.provenance import recorded

WRITTEN = ("out", "metrics", "curve", "plot")
"""Options that name what a stage writes."""
EXISTING = click.Path(path_type=Path)


class OneLineCommand(click.Command):
    """A command whose user's faults are one line and exit code 1; anything else is our own bug and keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: D102
        try:
            return self.work(ctx)
        except (ValueError, ArtifactError, OSError, SafetensorError) as error:
            raise click.ClickException(f"{self.title(ctx)}: {error}") from error

    def work(self, ctx: click.Context) -> Any:
        """What the command does."""
        return super().invoke(ctx)

    def title(self, ctx: click.Context) -> str:
        """What the line begins with."""
        return str(ctx.info_name)


class _StageCommand(OneLineCommand):
    def work(self, ctx: click.Context) -> Any:
        _check_before(ctx.params)
        with recorded(self.title(ctx)):
            return super().work(ctx)

    def title(self, ctx: click.Context) -> str:
        return "-".join([str(self.name), *filter(None, [ctx.params.get("source")])])


def _check_before(options: dict[str, Any]) -> None:
    """What would else be found out when the work is done: a source's name, and what is to be written."""
    source = options.get("source")
    if source is not None and not SOURCE_NAME.fullmatch(source):
        raise ValueError(f"{source!r} is no name of a source: lower-case letters, digits and _, a letter first")
    if out := options.get("out"):
        require_replaceable(out)
    for path in filter(None, (options.get(option) for option in WRITTEN)):
        if path.exists() and not path.is_file() and path != out:
            raise ValueError(
                f"{path} {'is a folder, and a file' if path.is_dir() else 'is no file, and one'} is to be written there"
            )
        above = next(parent for parent in path.absolute().parents if parent.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise ValueError(f"{path} cannot be written: {above} is {'read-only' if above.is_dir() else 'a file'}")


def stage_command(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """Make a function the command of stage ``name``; it receives ``params``, the path of ``params.yaml``.

    ``ValueError``, ``ArtifactError`` and what the system refuses (``OSError``, or safetensors in its place) end the command
    with their message and exit code 1; anything else is our own bug and keeps its traceback.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        params = click.option("--params", type=EXISTING, default=Path("params.yaml"), show_default=True, help="Knobs.")
        return click.command(name, cls=_StageCommand)(params(function))

    return decorate


def folder_option(flag: str, help_text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A required option that takes a path; paths come from ``dvc.yaml``, never from params."""
    return click.option(flag, type=EXISTING, required=True, help=help_text)
