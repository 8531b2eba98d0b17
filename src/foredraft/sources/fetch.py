"""The ``fetch`` stage: one source's raw bytes into an artefact, never edited."""

from pathlib import Path

from foredraft.artifacts import MANIFEST, Manifest, file_digest, publish
from foredraft.sources.config import FetchConfig, SourceConfig
from foredraft.sources.download import download
from foredraft.sources.transfer import forget
from foredraft.sources.uri import parse_uri


def fetch(source: SourceConfig, config: FetchConfig, out: Path) -> None:
    """Download ``source`` into the ``raw`` artefact ``out``.

    Raises:
        ValueError: see :func:`foredraft.sources.download.download`.
    """
    manifest = Manifest("raw", facts={"uri": source.uri, "sha256": source.sha256})
    with publish(out, manifest) as folder:
        download(source, config, folder, keep=True)
        if (folder / MANIFEST).exists():
            raise ValueError(f"{source.uri}: holds a file named {MANIFEST}, which is the name of our own; rename it")
    forget(source.uri)  # only now: sealing reads every byte, and may be stopped


def changed_on_disk(source: SourceConfig, raw: Path) -> bool:
    """Whether a ``file:`` source is no longer what was fetched into ``raw``: DVC sees its params, not the file."""
    uri = parse_uri(source.uri)
    if uri.scheme != "file" or not (raw / MANIFEST).is_file():
        return False
    fetched = Manifest.from_json((raw / MANIFEST).read_text(encoding="utf-8"))
    path = Path(uri.name)
    if fetched.facts["uri"] != source.uri or not path.exists():
        return False  # another source, which DVC sees, or a machine that has only what was fetched
    found = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sorted(map(file_digest, found)) != sorted(record.sha256 for record in fetched.files.values())
