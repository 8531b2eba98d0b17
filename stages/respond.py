"""respond@s: the target's own answers."""

from pathlib import Path

import click

from foredraft.artifacts import write_json
from foredraft.command import folder_option, stage_command
from foredraft.params import load_section
from foredraft.responses.config import RespondConfig
from foredraft.responses.respond import respond
from foredraft.sources.config import FetchConfig
from foredraft.target.config import TargetConfig


@stage_command("respond")
@click.argument("source")
@folder_option("--conversations", "Artefact of curate.")
@folder_option("--target", "Artefact of target.")
@folder_option("--out", "Artefact to write.")
@folder_option("--metrics", "Row account to write.")
def main(params: Path, source: str, conversations: Path, target: Path, out: Path, metrics: Path) -> None:
    """Let the target answer the prompts of SOURCE."""
    config = load_section(params, "respond", RespondConfig)
    model = load_section(params, "target", TargetConfig)
    fetch = load_section(params, "fetch", FetchConfig)
    write_json(metrics, respond(source, config, model, fetch, conversations, target, out))


if __name__ == "__main__":
    main()
