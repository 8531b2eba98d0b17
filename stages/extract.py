"""extract@s: the target's hidden states."""

from pathlib import Path

import click

from foredraft.artifacts import write_json
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
@folder_option("--metrics", "Row account to write.")
@click.option("--join", is_flag=True, help="Help the machine that does this, on a scratch folder that both see.")
def main(params: Path, source: str, tokens: Path, target: Path, out: Path, metrics: Path, join: bool) -> None:
    """Read the tokens of SOURCE with the target; keep tapped states and top-k."""
    config = load_section(params, "extract", ExtractConfig)
    model = load_section(params, "target", TargetConfig)
    fetch = load_section(params, "fetch", FetchConfig)
    account = extract(source, config, model, fetch, tokens, target, out, join)
    if not join:
        write_json(metrics, account)


if __name__ == "__main__":
    main()
