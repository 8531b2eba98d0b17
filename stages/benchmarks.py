"""benchmarks: held-out prompts."""

from pathlib import Path

from foredraft.artifacts import write_json
from foredraft.benchmarks.build import build_benchmarks
from foredraft.benchmarks.config import BenchmarksConfig
from foredraft.command import folder_option, stage_command
from foredraft.params import load_section
from foredraft.sources.config import FetchConfig


@stage_command("benchmarks")
@folder_option("--out", "Artefact to write.")
@folder_option("--metrics", "Row account to write.")
def main(params: Path, out: Path, metrics: Path) -> None:
    """Fetch the held-out prompts that acceptance is measured on and training data are kept clear of."""
    config = load_section(params, "benchmarks", BenchmarksConfig)
    write_json(metrics, build_benchmarks(config, load_section(params, "fetch", FetchConfig), out))


if __name__ == "__main__":
    main()
