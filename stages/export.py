"""export: the drafter in the layouts that engines read."""

from pathlib import Path

from foredraft.command import folder_option, stage_command
from foredraft.export.config import ExportConfig
from foredraft.export.export import export
from foredraft.params import load_section


@stage_command("export")
@folder_option("--drafter", "Artefact of train.")
@folder_option("--target", "Artefact of target.")
@folder_option("--out", "Artefact to write.")
def main(params: Path, drafter: Path, target: Path, out: Path) -> None:
    """Write the trained drafter for z-lab, vLLM, SGLang and Transformers."""
    export(load_section(params, "export", ExportConfig), drafter, target, out)


if __name__ == "__main__":
    main()
