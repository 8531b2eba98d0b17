"""The ``fetch`` stage: one source's raw bytes into an artefact, never edited."""

from pathlib import Path

from foredraft.artifacts import Manifest, publish
from foredraft.sources.config import FetchConfig, SourceConfig
from foredraft.sources.download import download


def fetch(source: SourceConfig, config: FetchConfig, out: Path) -> None:
    """Download ``source`` into the ``raw`` artefact ``out``.

    Raises:
        ValueError: see :func:`foredraft.sources.download.download`.
    """
    manifest = Manifest("raw", facts={"uri": source.uri, "sha256": source.sha256})
    with publish(out, manifest) as folder:
        download(source, config, folder)
