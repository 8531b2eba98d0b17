"""card: model cards, from what was just measured."""

import json
from pathlib import Path

from foredraft.command import folder_option, stage_command
from foredraft.export.card import write_cards
from foredraft.export.config import CardConfig
from foredraft.params import load_section, read_params


@stage_command("card")
@folder_option("--exported", "Artefact of export.")
@folder_option("--evaluated", "JSON of evaluate.")
@folder_option("--trained", "JSON of train.")
@folder_option("--out", "Artefact to write.")
def main(params: Path, exported: Path, evaluated: Path, trained: Path, out: Path) -> None:
    """Write a model card for every exported layout."""
    found, told = (json.loads(path.read_text(encoding="utf-8")) for path in (evaluated, trained))
    write_cards(load_section(params, "card", CardConfig), read_params(params), exported, found, told, out)


if __name__ == "__main__":
    main()
