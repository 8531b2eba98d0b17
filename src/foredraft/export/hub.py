"""Put an exported drafter and its card on a hub, with the user's own login.

usage: make push-hub REPO=org/name [LAYOUT=zlab] [PRIVATE=1] [YES=1]
"""

from pathlib import Path

import click
import httpx2
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import LocalTokenNotFoundError

from foredraft.artifacts import ArtifactError, open_artifact
from foredraft.command import OneLineCommand


def files_of(layout: str, exported: Path, cards: Path) -> dict[str, Path]:
    """What is uploaded, by its name there.

    Raises:
        ArtifactError: export or card is missing or damaged.
        ValueError: the layout was not exported, or the card is another drafter's.
    """
    export = open_artifact(exported, "export", "dvc repro export")
    names = [name for name in export.files if name.startswith(f"{layout}/")]
    if not names:
        raise ValueError(f"{exported} has no layout {layout}: see export.layouts")
    if open_artifact(cards, "card", "dvc repro card").facts.get("export") != export.fingerprint:
        raise ArtifactError(cards, f"was not written of {exported}", "dvc repro card")
    return {name.removeprefix(f"{layout}/"): exported / name for name in names} | {"README.md": cards / f"{layout}.md"}


@click.command(cls=OneLineCommand)
@click.argument("repo")
@click.option("--layout", type=click.Choice(["zlab", "speculators", "transformers"]), default="zlab", show_default=True)
@click.option("--exported", type=click.Path(path_type=Path), default=Path("data/export"), show_default=True)
@click.option("--cards", type=click.Path(path_type=Path), default=Path("data/card"), show_default=True)
@click.option("--private", is_flag=True, help="Make a repository that is not there yet private.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def main(repo: str, layout: str, exported: Path, cards: Path, private: bool, yes: bool) -> None:
    """Upload one layout of the drafter to REPO (org/name), after showing what would be uploaded."""
    files = files_of(layout, exported, cards)
    api = HfApi()
    click.echo(f"to {api.endpoint}/{repo}:")
    for name, path in sorted(files.items()):
        click.echo(f"  {name:<24} {path.stat().st_size:>15,} bytes   {path}")
    target = open_artifact(exported, "export", "dvc repro export").contract["target"]
    if target.startswith("file:"):
        click.echo(f"these files name a folder of this machine: {target}", err=True)
    if not yes:
        click.confirm("upload?", abort=True)
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in sorted(files.items())]
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        done = api.create_commit(repo, operations, commit_message=f"DFlash drafter, {layout} layout")
    except httpx2.TransportError as error:
        raise ValueError(f"{api.endpoint} cannot be reached: {str(error).splitlines()[0]}") from error
    except (httpx2.HTTPError, LocalTokenNotFoundError) as error:
        raise ValueError(f"{api.endpoint}: {str(error).splitlines()[0]} (hf auth login, or HF_TOKEN)") from error
    click.echo(f"uploaded: {done.commit_url}")


if __name__ == "__main__":
    main()
