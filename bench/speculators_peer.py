"""speculators 0.9.0's DFlash on our documents: its own defaults, model, collation, optimisers, schedule and trainer.

What is ours: the documents of each step, the sizes that both sides share, the learning rate, and when it is validated. Its
settings are read from the package, so that none is a matter of our reading; they are written into the report. Both of its
optimisers, Muon on matrices and AdamW on norms, have the one learning rate, as by its default.

How its words differ. Its layer id k is Transformers' ``hidden_states[k]``, one more than ours of the same tap. Of the target
it wants the states that go *into* the final norm, which it applies itself before the head; a slot's label is the argmax one
position earlier, as ours. Its layers slide by default, causal inside the block, over a window that is counted from the
anchor where ours is from the query: the same while no document is as long as the window.
"""

import tempfile
from argparse import Namespace
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bench.ground import Ground, Weights
from bench.stand_ins import open_speculators
from foredraft.drafter.attention import training_attention
from foredraft.drafter.blocks import block_inputs
from foredraft.features.layout import Document
from foredraft.target.frozen import FrozenTarget
from foredraft.training.trainer import plan_steps

OURS = ("fc", "hidden_norm", "layers", "norm")
"""Parts of its state dict that are the drafter; the others are the target's."""
GROUPS = ("draft", "data", "loss", "optimizer", "scheduler", "dflash")
"""Of its settings, those that a run depends on."""
TOLERANCE, AGREEMENT = 1e-4, 0.95
"""How far logits may lie apart, as a share of their spread, and how often labels must be equal (bfloat16 has near-ties)."""


@dataclass(frozen=True)
class Trained:
    """The weights of a run's best validation, under our names, and their tokens per step on it."""

    weights: Weights
    teacher_forced: float


class Peer:
    """The peer on a ground. One model is trained again and again: what was compiled for it serves every run.

    Args:
        attention: its ``draft_attn_impl``, where that is not to be its default (on a CPU it cannot be).

    Attributes:
        choice: its shape in our words.
    """

    def __init__(self, ground: Ground, attention: str | None = None):
        open_speculators()
        from speculators.train.config import TrainConfig
        from speculators.train.data import CollateFn

        config = ground.config
        shared: dict[str, Any] = {
            "speculator_type": "dflash",
            "verifier_name_or_path": str(ground.checkpoint),
            "num_layers": config.drafter.num_layers,
            "block_size": config.drafter.block_size,
            "mask_token_id": config.drafter.mask_token_id,
            "target_layer_ids": [layer + 1 for layer in ground.layer_ids],
            "total_seq_len": config.tokens_per_step,
            "max_anchors": config.anchors_per_row * config.rows_per_step,
            "epochs": config.epochs,
        }
        if ground.device.type == "cpu":
            shared |= {"draft_attn_impl": "eager", "loss_implementation": "eager"}
        if attention:
            shared["draft_attn_impl"] = attention
        self.ground = ground
        self.config = TrainConfig.from_flat(shared)
        self.settings = Namespace(**self.config.flatten())
        self.model = self.build(self.settings)
        kinds = self.model.config.transformer_layer_config.layer_types
        full = tuple(number for number, kind in enumerate(kinds) if kind == "full_attention")
        window = {"sliding_window": self.settings.sliding_window, "full_attention_layers": full}
        self.choice = config.drafter.model_copy(update=window if len(full) < len(kinds) else {})
        taps, hidden = len(ground.layer_ids), self.model.hidden_size
        self.collate = CollateFn(self.settings.total_seq_len, hidden, taps, torch.bfloat16)
        documents = [ground.train_data.document(number) for number in range(len(ground.train_data))]
        states = last_states(ground.frozen, [document.input_ids for document in documents])
        self.samples = [sample(*pair, ground.device) for pair in zip(documents, states, strict=True)]

    def build(self, settings: Namespace) -> Any:
        """A new model, as its command builds it."""
        from speculators.models.dflash import DFlashDraftModel
        from speculators.train.cli import build_draft_model

        vocabulary = self.ground.interface.manifest.facts["vocab_rows"]
        return build_draft_model(Namespace(**vars(settings)), DFlashDraftModel, None, None, vocabulary)

    def train(self, seed: int, rate: float) -> Trained:
        """Train by its trainer on the steps of our plan, validated by our measure as often as ours is by its own."""
        from speculators.train import cli, trainer

        settings = Namespace(**vars(self.settings) | {"seed": seed, "lr": rate, "muon_lr": rate})
        cli.set_seed(seed)
        self.model.load_state_dict(self.build(settings).state_dict())
        config = self.ground.configure({"seed": seed})
        steps = [[number for _, row in step for number in row] for step in plan_steps(self.ground.train_data, config)]
        best: list[Trained] = []

        def after_step() -> None:
            done = running.global_step
            if done % config.validate_every == 0 or done == len(steps):
                weights = self.weights()
                found = Trained(weights, self.ground.teacher_forced(self.choice, weights))
                if not best or found.teacher_forced >= best[-1].teacher_forced:
                    best[:] = [found]

        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(trainer, "get_local_rank", lambda: self.ground.device),
            mock.patch.object(trainer, "tqdm", lambda batches, **_: batches),
            mock.patch.object(torch.accelerator, "synchronize"),
        ):
            running = trainer.Trainer(self.model, self.trainer_config(settings, folder, len(steps)), Steps(self, steps))
            running.device_type = self.ground.device.type
            running.train_epoch(0, step_callback=after_step)
        return best[-1]

    def trainer_config(self, settings: Namespace, folder: str, steps: int) -> Any:
        """Its trainer's settings. Epochs are packed anew, so what is one epoch to it is all of ours."""
        from speculators.models.dflash import DFlashDraftModel
        from speculators.train.trainer import TrainerConfig

        taken = {key: value for key, value in vars(settings).items() if key in TrainerConfig._fields}
        arguments, _ = DFlashDraftModel.get_trainer_kwargs(**vars(settings))
        changed = {
            "num_epochs": 1,
            "save_path": folder,
            "log_freq": steps,
            "train_call_kwargs": arguments,
            "hidden_states_dtype": getattr(torch, settings.hidden_states_dtype),
        }
        return TrainerConfig(**taken | changed)

    def weights(self) -> Weights:
        """A copy of the drafter's weights; both sides name them as z-lab does."""
        state = self.model.state_dict()
        return {name: value.clone() for name, value in state.items() if name.split(".")[0] in OURS}

    @torch.no_grad()
    def check(self) -> dict[str, float]:
        """Compare its model's logits with those of our drafter of the same weights, in float32, on one row of documents.

        Returns:
            the largest difference of two logits as a share of their spread, and how often its labels are ours.

        Raises:
            ValueError: what is trained there would be something else here.
        """
        import speculators.models.dflash.core as core

        ground, config = self.ground, self.ground.config
        model = self.build(Namespace(**vars(self.settings) | {"draft_attn_impl": "eager"})).eval()
        # Norms are all one at first, and would be equal whichever is taken for which.
        weights = {name: (value + 0.1 * torch.rand_like(value)).cpu() for name, value in self.weights().items()}
        model.load_state_dict(weights, strict=False)
        seed, documents = plan_steps(ground.train_data, config)[0][0]
        row = ground.train_data.row(documents, ground.sizes(config.anchors_per_row), seed)
        blocks = row.blocks
        batch = {name: part.cpu() for name, part in self.batch(documents).items() if isinstance(part, Tensor)}
        batch = {name: part.float() if part.is_floating_point() else part for name, part in batch.items()}
        anchors = (blocks.starts + blocks.anchors, blocks.exists)
        with mock.patch.object(core, "select_anchors", lambda *_: anchors):
            _, theirs, targets, _, _ = model._backbone_forward(**batch, max_anchors=len(blocks.anchors))

        drafter = ground.drafter(self.choice, weights, torch.float32).cpu()
        head, mask = (part.cpu().float() for part in (ground.interface.lm_head, ground.mask))
        inputs = block_inputs(row.embedded.float(), mask, blocks.block_size).flatten(0, 1)[None]
        context = drafter.read_context(row.target_hidden[None].float(), row.positions[None])
        attention = {
            kind: training_attention(
                blocks, row.bounds, None if kind == "full_attention" else self.choice.sliding_window
            )
            for kind in set(self.choice.layer_types)
        }
        ours = drafter.fill(inputs, blocks.positions.flatten()[None], context, attention)[0] @ head.T
        there = blocks.exists.repeat_interleave(blocks.block_size)
        apart = float((ours - theirs[0])[there].abs().max() / ours[there].std())
        slots = row.slots[: row.count]
        agree = float((targets[0, slots].argmax(-1) == row.topk_ids[: row.count, 0]).float().mean())
        if apart > TOLERANCE or agree < AGREEMENT:
            raise ValueError(f"the peer's model is not ours: logits {apart:.2g} apart, {agree:.1%} of the labels equal")
        return {"logits_apart": apart, "labels_equal": agree}

    def batch(self, documents: list[int]) -> dict[str, Any]:
        """A step's documents, collated by the package."""
        return self.collate([self.samples[number] for number in documents])

    def described(self) -> dict[str, Any]:
        """What it is trained by, for the report: learning rate and seed are the run's."""
        return {group: getattr(self.config, group).model_dump(mode="json") for group in GROUPS}


class Steps:
    """A loader of batches, as its trainer wants one."""

    batch_sampler = None

    def __init__(self, peer: Peer, steps: list[list[int]]):
        self.peer, self.steps = peer, steps

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Any:
        return map(self.peer.batch, self.steps)


def sample(document: Document, last: Tensor, device: torch.device) -> dict[str, Tensor]:
    """A document as its data set gives one."""
    length = len(document.input_ids)
    return {
        "hidden_states": document.target_hidden.flatten(1).to(device),  # (T, L * D)
        "input_ids": document.input_ids.to(device),
        "verifier_last_hidden_states": last,  # (T, D)
        "loss_mask": document.loss_mask.long().to(device),
        "position_ids": torch.arange(length, device=device),
        "lengths": torch.tensor([length]),
    }


@torch.no_grad()
def last_states(frozen: FrozenTarget, documents: list[Tensor], together: int = 32) -> list[Tensor]:
    """What goes into the target's final norm, ``(T, D)`` of each of the documents' ids ``(T)``."""
    whole = FrozenTarget(frozen.model, [len(frozen.blocks) - 1])
    order = sorted(range(len(documents)), key=lambda number: len(documents[number]))
    found: dict[int, Tensor] = {}
    for start in range(0, len(order), together):
        part = order[start : start + together]
        padded = pad_sequence([documents[number] for number in part], batch_first=True).to(frozen.device)
        taps, _ = whole.read(padded)
        found |= {number: taps[row, : len(documents[number]), 0] for row, number in enumerate(part)}
    return [found[number] for number in range(len(documents))]
