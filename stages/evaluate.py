"""evaluate: tokens per step of the exported drafter."""

from pathlib import Path

from foredraft.command import folder_option, stage_command
from foredraft.params import load_section, source_names
from foredraft.sources.config import FetchConfig
from foredraft.speculation.config import EvaluateConfig
from foredraft.speculation.evaluate import evaluate
from foredraft.target.config import TargetConfig


@stage_command("evaluate")
@folder_option("--exported", "Artefact of export.")
@folder_option("--target", "Artefact of target.")
@folder_option("--benchmarks", "Artefact of benchmarks.")
@folder_option("--tokens", "Folder of the artefacts of prepare, one a source.")
@folder_option("--metrics", "JSON to write.")
@folder_option("--plot", "CSV to write.")
def main(params: Path, exported: Path, target: Path, benchmarks: Path, tokens: Path, metrics: Path, plot: Path) -> None:
    """Decode held-out prompts with the exported drafter and with its baselines."""
    config = load_section(params, "evaluate", EvaluateConfig)
    model = load_section(params, "target", TargetConfig)
    fetch = load_section(params, "fetch", FetchConfig)
    folders = {source: tokens / source for source in source_names(params)}
    evaluate(config, model, fetch, exported, target, benchmarks, folders, metrics, plot)


if __name__ == "__main__":
    main()
