"""prepare@s: answers to token shards."""

from pathlib import Path

import click

from foredraft.artifacts import write_json
from foredraft.command import folder_option, stage_command
from foredraft.params import load_section
from foredraft.tokens.config import PrepareConfig
from foredraft.tokens.prepare import prepare


@stage_command("prepare")
@click.argument("source")
@folder_option("--responses", "Artefact of respond.")
@folder_option("--target", "Artefact of target.")
@folder_option("--out", "Artefact to write.")
@folder_option("--metrics", "Row account to write.")
def main(params: Path, source: str, responses: Path, target: Path, out: Path, metrics: Path) -> None:
    """Lay out the token ids and loss mask of SOURCE in shards."""
    config = load_section(params, "prepare", PrepareConfig)
    write_json(metrics, prepare(source, config, responses, target, out))


if __name__ == "__main__":
    main()
