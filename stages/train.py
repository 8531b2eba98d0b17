"""train: features to a drafter."""

from pathlib import Path

import click

from foredraft.command import folder_option, stage_command
from foredraft.params import load_section, source_names
from foredraft.training.config import TrainConfig
from foredraft.training.stage import train


@stage_command("train")
@folder_option("--features", "Folder of the artefacts of extract, one a source.")
@folder_option("--target", "Artefact of target.")
@folder_option("--out", "Artefact to write.")
@folder_option("--metrics", "JSON to write.")
@folder_option("--live", "Folder of DVCLive's curves to write.")
@click.option("--join", is_flag=True, help="Help the machine that does this, on a scratch folder that both see.")
def main(params: Path, features: Path, target: Path, out: Path, metrics: Path, live: Path, join: bool) -> None:
    """Train a drafter on the features of every source of the params."""
    folders = {source: features / source for source in source_names(params)}
    train(load_section(params, "train", TrainConfig), folders, target, out, metrics, live, join)


if __name__ == "__main__":
    main()
