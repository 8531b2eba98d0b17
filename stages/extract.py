"""extract@s: the target's hidden states."""

from pathlib import Path

import click

from foredraft.command import folder_option, stage_command
from foredraft.features.config import ExtractConfig
from foredraft.features.engine import extract
from foredraft.params import load_section
from foredraft.sources.config import FetchConfig
from foredraft.target.config import TargetConfig


@stage_command("extract")
@click.argument("source")
@folder_option("--tokens", "Artefact of prepare.")
@folder_option("--target", "Artefact of target.")
@folder_option("--out", "Artefact to write.")
def main(params: Path, source: str, tokens: Path, target: Path, out: Path) -> None:
    """Read the tokens of SOURCE with the target; keep tapped states and top-k."""
    config = load_section(params, "extract", ExtractConfig)
    model = load_section(params, "target", TargetConfig)
    extract(source, config, model, load_section(params, "fetch", FetchConfig), tokens, target, out)


if __name__ == "__main__":
    main()
