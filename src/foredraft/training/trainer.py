"""The ``train`` stage: features -> a drafter, exactly resumable."""

import csv
import io
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from foredraft.artifacts import Manifest, require_same_contract, write_atomic, write_json
from foredraft.drafter.config import DrafterShape
from foredraft.drafter.model import Drafter
from foredraft.progress import Progress
from foredraft.provenance import commit
from foredraft.scratch import Scratch, open_scratch, work_fingerprint
from foredraft.target.interface import Interface, read_interface
from foredraft.training.batches import FeatureData, open_all_features
from foredraft.training.checkpoint import Progressed, load_checkpoint, save_checkpoint
from foredraft.training.config import TrainConfig
from foredraft.training.initialise import initialise
from foredraft.training.objective import Head, Outcome, run_batch
from foredraft.training.optim import build_optimizer, learning_rate

WEIGHTS = "drafter.safetensors"
SHAPE = "shape.json"


class Trainer:
    """One run: data, model, optimiser, and how far it is."""

    def __init__(self, config: TrainConfig, shape: DrafterShape, interface: Interface, folders: dict[str, Path]):
        self.config = config
        self.dtype = getattr(torch, config.compute_dtype)
        self.train_data = FeatureData(folders, "train")
        self.validation_data = FeatureData(folders, "validation")
        for split, data in {"train": self.train_data, "validation": self.validation_data}.items():
            if len(data) == 0:
                raise ValueError(f"no {split} document in {', '.join(map(str, folders.values()))}")
        check_mask_token(config.drafter.mask_token_id, self.train_data, interface.manifest.facts)
        self.embeddings = interface.embed_tokens.to(self.dtype)
        rows = self.train_data.answer_ids() if config.head_rows == "occurring" else None
        self.train_head = Head.build(interface.lm_head, rows, self.dtype)
        self.full_head = Head.build(interface.lm_head, None, self.dtype)
        self.drafter = Drafter(shape)
        initialise(self.drafter, config.start, interface, torch.Generator().manual_seed(config.seed))
        self.optimizer = build_optimizer(self.drafter, config)
        self.plan = [
            (epoch, number, documents)
            for epoch in range(config.epochs)
            for number, documents in enumerate(self.train_data.epoch(config.seed, epoch, config.tokens_per_step))
        ]

    def run(self, scratch: Scratch) -> Progressed:
        """Train to the end, from the last complete checkpoint in ``scratch``."""
        progressed = load_checkpoint(scratch.path, self.drafter, self.optimizer)
        with Progress("train", len(self.plan), "steps", done=progressed.step) as progress:
            while progressed.step < len(self.plan):
                record = self.step(progressed)
                progressed.step += 1
                last = progressed.step == len(self.plan)
                if last or progressed.step % self.config.validate_every == 0:
                    record |= {
                        f"val_{key}": value for key, value in self.validate().items() if key != "accuracy_by_slot"
                    }
                    self._keep_best(progressed, record, scratch)
                progressed.curve.append(record)
                if last or progressed.step % self.config.checkpoint_every == 0:
                    save_checkpoint(scratch.path, self.drafter, self.optimizer, progressed)
                progress.advance(1, note=f"loss {record['loss']:.3f}")
        return progressed

    def step(self, progressed: Progressed) -> dict[str, Any]:
        """One optimiser step on the planned documents; its record for the curve.

        Raises:
            ValueError: too many steps had a non-finite loss or gradient; names the documents of the last.
        """
        started = time.perf_counter()
        epoch, number, documents = self.plan[progressed.step]
        generator = torch.Generator().manual_seed((self.config.seed * 1_000_003 + epoch) * 1_000_003 + number)
        batch = self.train_data.batch(
            documents, self.config.anchors_per_step, self.config.drafter.block_size, generator
        )
        rate = learning_rate(self.config, progressed.step, len(self.plan))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            outcome = run_batch(self.drafter, batch, self.embeddings, self.train_head, self.config.loss)
        loss = outcome.loss / outcome.weight.clamp(min=1e-12)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.config.clip)
        if torch.isfinite(loss) and torch.isfinite(norm):
            self.optimizer.step()
        else:
            progressed.skipped += 1
            if progressed.skipped > self.config.max_skipped_steps:
                raise ValueError(
                    f"train: step {progressed.step}: loss {float(loss.detach())}, gradient norm {float(norm)}: "
                    f"{progressed.skipped} steps skipped; documents {', '.join(batch.names)}"
                )
        return {
            "step": progressed.step + 1,
            "loss": float(loss.detach()),
            "lr": rate,
            "gradient_norm": float(norm),
            "tokens_per_step": 1 + outcome.accepted / max(1, outcome.blocks),
            "anchors": outcome.blocks,
            "seconds": time.perf_counter() - started,
        }

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Loss and acceptance on held-out documents: the same code, all rows of the head, fixed anchors."""
        steps = self.validation_data.epoch(self.config.seed, 0, self.config.tokens_per_step)
        budget = max(1, self.config.validation_anchors // len(steps))
        outcomes = []
        for number, documents in enumerate(steps):
            generator = torch.Generator().manual_seed(number)
            batch = self.validation_data.batch(documents, budget, self.config.drafter.block_size, generator)
            with self._autocast():
                outcomes.append(run_batch(self.drafter, batch, self.embeddings, self.full_head, self.config.loss))
        return pooled(outcomes)

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def _keep_best(self, progressed: Progressed, record: dict[str, Any], scratch: Scratch) -> None:
        if not progressed.best or record["val_tokens_per_step"] > progressed.best["tokens_per_step"]:
            scratch.write(WEIGHTS, lambda path: save_file(self.drafter.state_dict(), path))
            progressed.best = {"step": progressed.step, "tokens_per_step": record["val_tokens_per_step"]}


def pooled(outcomes: list[Outcome]) -> dict[str, Any]:
    """Numbers of a whole set, from sums and counts."""
    counted = torch.stack([outcome.counted for outcome in outcomes]).sum(0)
    correct = torch.stack([outcome.correct for outcome in outcomes]).sum(0)
    blocks = sum(outcome.blocks for outcome in outcomes)
    weight = sum(float(outcome.weight) for outcome in outcomes)
    return {
        "loss": sum(float(outcome.loss) for outcome in outcomes) / max(weight, 1e-12),
        "tokens_per_step": 1 + sum(outcome.accepted for outcome in outcomes) / max(1, blocks),
        "accepted_per_step": sum(outcome.accepted for outcome in outcomes) / max(1, blocks),
        "blocks": blocks,
        "accuracy_by_slot": (correct[1:] / counted[1:].clamp(min=1)).tolist(),
    }


def check_mask_token(mask_token_id: int, data: FeatureData, facts: dict[str, Any]) -> None:
    """Refuse a mask token that means something.

    Raises:
        ValueError: it is past the embedding, an end or padding token, or occurs in the data.
    """
    key = f"train.drafter.mask_token_id = {mask_token_id}"
    if mask_token_id >= facts["vocab_rows"]:
        raise ValueError(f"{key}: the target has {facts['vocab_rows']} embedding rows")
    if mask_token_id in (*facts["eos_token_ids"], facts["pad_token_id"]):
        raise ValueError(f"{key}: that is the target's end-of-turn or padding token")
    if data.uses(mask_token_id):
        raise ValueError(f"{key}: that id occurs in the data; choose a row that they never use")


def train(config: TrainConfig, features: dict[str, Path], target: Path, out: Path, metrics: Path, curve: Path) -> None:
    """Train on the features of all sources and publish the ``drafter`` artefact, its metrics and its curve.

    Args:
        features: folder of each source.

    Raises:
        ArtifactError: an input is missing, damaged, or of another contract.
        ValueError: no documents, an unusable mask token, too many non-finite steps.
    """
    manifests = open_all_features(features)
    interface = read_interface(target)
    origins = {source: manifest.contract["response_origin"] for source, manifest in manifests.items()}
    contract = {**next(iter(manifests.values())).contract, "response_origin": origins}
    require_same_contract(interface.manifest.contract, contract, target, "dvc repro target extract")
    facts = interface.manifest.facts
    shape = DrafterShape(
        choice=config.drafter,
        hidden_size=facts["hidden_size"],
        vocab_rows=facts["vocab_rows"],
        target_layer_ids=tuple(contract["target_layer_ids"]),
        num_target_layers=facts["num_layers"],
        rms_norm_eps=facts["rms_norm_eps"],
        rope_theta=facts["rope_theta"],
        max_position_embeddings=facts["max_position_embeddings"],
    )
    key = work_fingerprint("train", config.model_dump(), {**manifests, "target": interface.manifest})
    with open_scratch("train", key) as scratch:
        trainer = Trainer(config, shape, interface, features)
        progressed = trainer.run(scratch)
        scratch.write(SHAPE, lambda path: path.write_text(shape.model_dump_json(indent=1) + "\n", encoding="utf-8"))
        choice = config.drafter
        manifest = Manifest(
            "drafter",
            contract={**contract, "block_size": choice.block_size, "mask_token_id": choice.mask_token_id},
            counts={"documents": len(trainer.train_data), "validation_documents": len(trainer.validation_data)},
            facts={"best": progressed.best},
        )
        scratch.publish(out, manifest, [WEIGHTS, SHAPE])
    write_json(metrics, summary(progressed, trainer))
    write_atomic(curve, curve_csv(progressed.curve))


def summary(progressed: Progressed, trainer: Trainer) -> dict[str, Any]:
    """What ``dvc metrics show`` shows of a run."""
    last = progressed.curve[-1]
    seconds = sum(record["seconds"] for record in progressed.curve)
    return {
        "loss": last["loss"],
        "steps": progressed.step,
        "skipped_steps": progressed.skipped,
        "documents": len(trainer.train_data),
        "parameters": sum(p.numel() for p in trainer.drafter.parameters()),
        "anchors_per_second": sum(record["anchors"] for record in progressed.curve) / seconds,
        "best_step": progressed.best["step"],
        "val": {key.removeprefix("val_"): value for key, value in last.items() if key.startswith("val_")},
        "commit": commit(),
    }


def curve_csv(curve: list[dict[str, Any]]) -> str:
    """The curve as CSV; validation columns are filled where a validation was."""
    columns = list(dict.fromkeys(key for record in reversed(curve) for key in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(curve)
    return text.getvalue()
