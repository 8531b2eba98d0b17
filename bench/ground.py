"""The ground on which drafters compete: one set of features, one way to train ours on them, one way to measure any.

A drafter is measured twice. Teacher-forced: tokens per step of blocks anchored all over the validation documents, the same
anchors for every drafter and every label the target's likeliest, whatever the drafter was trained on. Generated: tokens per
step of :func:`foredraft.speculation.decode.decode` on held-out prompts, all in one batch.
"""

import inspect
import json
import os
import platform
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.artifacts import require_same_contract, write_json
from foredraft.devices import default_device
from foredraft.drafter.config import DrafterConfig, DrafterShape
from foredraft.drafter.model import Drafter
from foredraft.features.config import ExtractConfig
from foredraft.features.engine import extract
from foredraft.features.layout import quantise
from foredraft.imports import ROOT
from foredraft.params import load_section, parse_section, read_params
from foredraft.provenance import commit, versions
from foredraft.scratch import Scratch
from foredraft.sources.config import FetchConfig
from foredraft.speculation.acceptance import Trace
from foredraft.speculation.config import EvaluateConfig
from foredraft.speculation.decode import decode
from foredraft.speculation.proposers import DFlashProposer
from foredraft.speculation.session import open_session
from foredraft.target.config import TargetConfig
from foredraft.target.frozen import load_target
from foredraft.target.interface import read_interface, write_interface
from foredraft.target.weights import checkpoint_folder
from foredraft.training.config import TrainConfig
from foredraft.training.data import FeatureData, Row, RowSizes, open_all_features
from foredraft.training.objective import Head, run_row
from foredraft.training.ranks import Ranks
from foredraft.training.trainer import WEIGHTS, Trainer, pooled

PARAMS = ROOT / "params.yaml"
Weights = dict[str, Tensor]
"""A drafter's state dict."""


@dataclass(frozen=True)
class HeldOut:
    """A held-out prompt: its benchmark and its token ids."""

    benchmark: str
    ids: list[int]


class Ground:
    """Features, target and prompts, read once. What is missing of ``data/target`` and ``data/features`` is made first.

    Args:
        data: folder of the artefacts; of ``tokens`` all sources must be there.
        prompts: file of held-out prompts, see :func:`write_prompts`.
        anchors: of the teacher-forced measure, over all validation documents.
        changes: of the ``train`` section, ``a.b=value`` each.

    Attributes:
        asked: what it was made of.
        section: the ``train`` section, as it is read.
        checkpoint: folder of the target's full weights.
    """

    def __init__(self, data: Path, prompts: Path, anchors: int, changes: tuple[str, ...] = ()):
        self.asked = {"data": data, "prompts": prompts, "anchors": anchors, "changes": changes}
        target, fetch = load_section(PARAMS, "target", TargetConfig), load_section(PARAMS, "fetch", FetchConfig)
        params = read_params(PARAMS)
        self.section: dict[str, Any] = params["train"]
        for change in changes:
            self.section = merged(self.section, as_mapping(change))
        self.features = {source: data / "features" / source for source in sorted(params["sources"])}
        make_missing(data, list(self.features), target, fetch)
        manifests = open_all_features(self.features)
        self.interface = read_interface(data / "target")
        contract = next(iter(manifests.values())).contract
        shared = {key: value for key, value in contract.items() if key != "response_origin"}
        require_same_contract(self.interface.manifest.contract, shared, data / "target", "dvc repro extract")
        self.layer_ids = tuple(contract["target_layer_ids"])
        self.device, self.dtype = torch.device(default_device()), getattr(torch, self.section["compute_dtype"])
        self.checkpoint = checkpoint_folder(target, fetch)
        self.frozen = load_target(self.checkpoint, target, self.layer_ids)
        require_cache(self.frozen.model)
        self.prompts = [HeldOut(**row) for row in json.loads(prompts.read_text(encoding="utf-8"))]
        self.max_new_tokens = load_section(PARAMS, "evaluate", EvaluateConfig).max_new_tokens
        self.train_data = FeatureData(self.features, "train")
        self.config = self.configure({})
        self.embeddings = self.interface.embed_tokens.to(self.dtype)
        self.mask = self.embeddings[self.config.drafter.mask_token_id].to(self.device)
        self.head = Head.build(self.interface.lm_head).to(self.device, self.dtype)
        self.rows = self._validation_rows(anchors)

    def configure(self, changes: dict[str, Any]) -> TrainConfig:
        """The params' ``train`` section with ``changes``, which may be nested."""
        return parse_section(PARAMS, "train", merged(self.section, changes), TrainConfig)

    def sizes(self, anchors: int) -> RowSizes:
        """Sizes of a row of so many blocks."""
        return RowSizes(self.config.tokens_per_row, anchors, self.config.drafter.block_size, self.embeddings)

    def shape(self, choice: DrafterConfig) -> DrafterShape:
        """All of a drafter's shape: what is chosen and what is the target's."""
        facts = self.interface.manifest.facts
        taken = ("hidden_size", "vocab_rows", "rms_norm_eps", "rope_theta", "max_position_embeddings")
        return DrafterShape(
            choice=choice,
            target_layer_ids=self.layer_ids,
            num_target_layers=facts["num_layers"],
            **{key: facts[key] for key in taken},
        )

    def train(self, config: TrainConfig, features: dict[str, Path]) -> Weights:
        """Train ours as the ``train`` stage does; gives the weights that it would publish."""
        config = config.model_copy(update={"checkpoint_every": 10**9})  # the last step's is all that a run here needs
        with tempfile.TemporaryDirectory() as folder:
            scratch = Scratch(Path(folder))
            Trainer(config, self.shape(config.drafter), self.interface, features).run(scratch)
            return load_file(scratch.path / WEIGHTS)

    @torch.no_grad()
    def teacher_forced(self, choice: DrafterConfig, weights: Weights) -> float:
        """Tokens per step on the validation documents."""
        drafter = self.drafter(choice, weights, torch.float32)
        loss = self.config.loss.model_copy(update={"labels": "target_argmax"})
        outcomes = [run_row(drafter, choice, row, self.mask, self.head, loss) for row in self.rows]
        return pooled(outcomes, Ranks(self.device))["tokens_per_step"]

    def generate(self, choice: DrafterConfig, weights: Weights) -> list[Trace]:
        """Decode the prompts, with the weights in the type that they are published and served in."""
        proposer = DFlashProposer(self.drafter(choice, weights, torch.bfloat16), self.frozen)
        eos = self.interface.manifest.facts["eos_token_ids"]
        prompts = [prompt.ids for prompt in self.prompts]
        return decode(open_session(self.frozen), proposer, prompts, self.max_new_tokens, eos)

    def drafter(self, choice: DrafterConfig, weights: Weights, dtype: torch.dtype) -> Drafter:
        """A drafter with these weights, on the device."""
        drafter = Drafter(self.shape(choice))
        drafter.load_state_dict(weights)
        return drafter.to(self.device, dtype).eval().requires_grad_(False)

    def about(self) -> dict[str, Any]:
        """What a report says of where and on what it was measured."""
        benchmarks = sorted({prompt.benchmark for prompt in self.prompts})
        counts = {name: sum(prompt.benchmark == name for prompt in self.prompts) for name in benchmarks}
        return {
            "commit": os.environ.get("COMMIT") or commit(),
            "hardware": torch.cuda.get_device_name() if self.device.type == "cuda" else platform.machine(),
            "threads": torch.get_num_threads(),
            "versions": versions() | package_versions("speculators"),
            "train": self.section,
            "documents": len(self.train_data),
            "tokens": sum(self.train_data.lengths),
            "validation_blocks": sum(int(row.blocks.exists.sum()) for row in self.rows),
            "prompts": counts,
            "max_new_tokens": self.max_new_tokens,
        }

    def _validation_rows(self, anchors: int) -> list[Row]:
        data = FeatureData(self.features, "validation")
        rows = data.epoch(0, 0, self.config.tokens_per_row)
        sizes = self.sizes(max(1, anchors // len(rows)))
        return [data.row(documents, sizes, number).to(self.device) for number, documents in enumerate(rows)]


def require_cache(model: Any) -> None:
    """Refuse a Transformers that would take a cache by another name, and decode without one.

    Raises:
        ValueError: names the version.
    """
    if "cache" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"Transformers {version('transformers')} is older than pyproject.toml asks for: it cannot decode"
        )


def merged(section: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``section`` with ``changes``, mapping by mapping."""
    changed = {key: merged(section[key], to) if isinstance(to, dict) else to for key, to in changes.items()}
    return {**section, **changed}


def as_mapping(change: str) -> dict[str, Any]:
    """``a.b=value`` -> ``{a: {b: value}}``; the value as YAML has it."""
    path, _, told = change.partition("=")
    value = YAML(typ="safe").load(told)
    for key in reversed(path.split(".")):
        value = {key: value}
    return cast(dict[str, Any], value)


def make_missing(data: Path, sources: list[str], target: TargetConfig, fetch: FetchConfig) -> None:
    """Do the work of the stages ``target`` and ``extract`` where their artefacts are not there."""
    if not (data / "target").exists():
        write_interface(target, fetch, data / "target")
    extracting = load_section(PARAMS, "extract", ExtractConfig)
    for source in sources:
        tokens, out = data / "tokens" / source, data / "features" / source
        if not out.exists():
            extract(source, extracting, target, fetch, tokens, data / "target", out)


def write_prompts(data: Path, each: int, out: Path) -> None:
    """Write the token ids of ``each`` prompts of every benchmark, as ``evaluate`` takes them: a small file that needs no
    Parquet to be read."""
    from foredraft.benchmarks.build import read_benchmarks
    from foredraft.chat.render import Renderer
    from foredraft.speculation.evaluate import take_prompts
    from foredraft.target.tokenizer import read_tokenizer

    config = load_section(PARAMS, "evaluate", EvaluateConfig).model_copy(update={"prompts": each})
    renderer = Renderer(read_tokenizer(data / "target"), load_section(PARAMS, "target", TargetConfig).thinking)
    prompts, _ = take_prompts(read_benchmarks(data / "benchmarks")[1], renderer, config)
    write_json(out, [asdict(prompt) for prompt in prompts])


def write_float8(features: dict[str, Path], folder: Path) -> dict[str, Path]:
    """Copy features with their states in float8, rounded from bfloat16 by the function that ``extract`` uses."""
    copies = {source: folder / source for source in features}
    for source, stored in features.items():
        copies[source].mkdir()
        for path in stored.glob("*.safetensors"):
            tensors = load_file(path)
            tensors["target_hidden"], tensors["scale"] = quantise(tensors["target_hidden"])
            save_file(tensors, copies[source] / path.name)
    return copies


def package_versions(*names: str) -> dict[str, str]:
    """Versions of packages, of those that are there."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
