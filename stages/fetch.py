"""fetch@s: a source's raw bytes."""

from pathlib import Path

import click

from foredraft.command import folder_option, stage_command
from foredraft.params import load_section
from foredraft.sources.config import FetchConfig, SourceConfig
from foredraft.sources.fetch import fetch


@stage_command("fetch")
@click.argument("source")
@folder_option("--out", "Artefact to write.")
def main(params: Path, source: str, out: Path) -> None:
    """Download SOURCE, byte for byte."""
    fetch(load_section(params, f"sources.{source}", SourceConfig), load_section(params, "fetch", FetchConfig), out)


if __name__ == "__main__":
    main()
