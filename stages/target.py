"""target: what of the target the later stages need."""

from pathlib import Path

from foredraft.command import folder_option, stage_command
from foredraft.params import load_section
from foredraft.sources.config import FetchConfig
from foredraft.target.config import TargetConfig
from foredraft.target.interface import write_interface


@stage_command("target")
@folder_option("--out", "Artefact to write.")
def main(params: Path, out: Path) -> None:
    """Keep the target's tokenizer, template, embeddings, head, norm and last layers."""
    write_interface(load_section(params, "target", TargetConfig), load_section(params, "fetch", FetchConfig), out)


if __name__ == "__main__":
    main()
