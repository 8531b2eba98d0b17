"""curate@s: raw rows to canonical conversations."""

from pathlib import Path

import click

from foredraft.artifacts import write_json
from foredraft.command import folder_option, stage_command
from foredraft.conversations.config import CurateConfig
from foredraft.conversations.curate import curate
from foredraft.params import load_section
from foredraft.sources.config import SourceConfig


@stage_command("curate")
@click.argument("source")
@folder_option("--raw", "Artefact of fetch.")
@folder_option("--benchmarks", "Artefact of benchmarks.")
@folder_option("--out", "Artefact to write.")
@folder_option("--metrics", "Row account to write.")
def main(params: Path, source: str, raw: Path, benchmarks: Path, out: Path, metrics: Path) -> None:
    """Read, filter, cap and split the conversations of SOURCE."""
    shape = load_section(params, f"sources.{source}", SourceConfig)
    config = load_section(params, "curate", CurateConfig)
    write_json(metrics, curate(source, shape, config, raw, benchmarks, out))


if __name__ == "__main__":
    main()
