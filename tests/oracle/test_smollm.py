"""On the real small target, in fp32: our loop, Transformers' loop and z-lab's loop say what plain decoding says."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foredraft.benchmarks.build import read_benchmarks
from foredraft.chat.render import Renderer
from foredraft.drafter.drafting import fill_blocks
from foredraft.drafter.model import Drafter, initialise_random
from foredraft.export.check import draft_logits
from foredraft.features.batching import plan_shards
from foredraft.features.checks import distances, truth_check
from foredraft.features.reading import Reader
from foredraft.layouts.convert import to_speculators, to_zlab
from foredraft.layouts.zlab import CONFIG, WEIGHTS, read_zlab
from foredraft.speculation.decode import decode
from foredraft.speculation.proposers import DFlashProposer
from foredraft.speculation.session import ReplaySession, TreeSession
from foredraft.target.frozen import FrozenTarget
from foredraft.target.generate import greedy_answers
from foredraft.target.interface import read_interface
from foredraft.target.tokenizer import read_tokenizer
from foredraft.tokens.shards import read_shard
from tests.conftest import ROOT
from tests.workspace import Workspace

pytestmark = pytest.mark.slow
NEW, EOS = 24, [2]


@pytest.fixture(scope="module")
def prompts(smoke: Workspace) -> list[list[int]]:
    """The shortest held-out prompt of each benchmark."""
    renderer = Renderer(read_tokenizer(smoke.path / "data/target"), thinking=False)
    _, rows = read_benchmarks(smoke.path / "data/benchmarks")
    return [
        min((renderer.prompt_ids(row.messages, row.tools) for row in benchmark[:20]), key=len)
        for benchmark in rows.values()
    ]


@pytest.fixture(scope="module")
def learned(smoke: Workspace) -> list[list[int]]:
    """Beginnings of answers that the small drafter was trained on: it has some drafts right there, if nowhere else."""
    shard = read_shard(smoke.path / "data/tokens/code/train-00000.safetensors")
    documents = (shard.document(index) for index in range(4))
    return [ids[: int(mask.nonzero()[0]) + 6].tolist() for ids, mask in documents]


@pytest.fixture(scope="module")
def references(smollm: FrozenTarget, prompts: list[list[int]]) -> list[list[int]]:
    return [greedy_answers(smollm.model, [prompt], NEW, EOS)[0] for prompt in prompts]


@pytest.fixture(scope="module")
def trained(smoke: Workspace) -> Drafter:
    return read_zlab(smoke.path / "data/export/zlab", torch.float32)


@pytest.mark.parametrize("which", ["trained", "random"])
def test_a_batch_says_what_plain_decoding_says(
    smollm: FrozenTarget,
    trained: Drafter,
    prompts: list[list[int]],
    learned: list[list[int]],
    references: list[list[int]],
    which: str,
) -> None:
    drafter = trained
    prompts = prompts + learned
    references = references + [greedy_answers(smollm.model, [prompt], NEW, EOS)[0] for prompt in learned]
    if which == "random":
        drafter = Drafter(trained.shape)
        initialise_random(drafter, torch.Generator().manual_seed(0))
    traces = decode(TreeSession(smollm), DFlashProposer(drafter, smollm), prompts, NEW, EOS)
    assert [trace.tokens for trace in traces] == references
    if which == "trained":
        assert sum(accepted for trace in traces for _, accepted, _ in trace.steps) > 0


def test_replaying_says_the_same(
    smollm: FrozenTarget, trained: Drafter, prompts: list[list[int]], references: list[list[int]]
) -> None:
    (trace,) = decode(ReplaySession(smollm), DFlashProposer(trained, smollm), prompts[:1], NEW, EOS)
    assert trace.tokens == references[0]


def test_the_truth_check_passes(smollm: FrozenTarget, prompts: list[list[int]]) -> None:
    checks = truth_check(smollm, [torch.tensor(prompt) for prompt in prompts[:2]])
    assert max(check.worst for check in checks) < 1e-4


def test_every_stored_state_is_that_of_a_stock_forward_alone(smoke: Workspace, smollm: FrozenTarget) -> None:
    """Real documents of all lengths in one batch, against each by itself; states here are hundreds in length."""
    tokens = smoke.path / "data/tokens/code"
    plan = plan_shards(tokens, ["train-00000.safetensors"], 10**6, 10**6)[0]
    documents = sorted(plan.read(tokens), key=lambda document: len(document[0]))[:: len(plan.lengths) // 5]
    reading = Reader(smollm, torch.float32, 16).read(documents)
    start = 0
    for ids, _ in documents:
        with torch.inference_mode():
            stock = smollm.model(input_ids=ids[None].long(), output_hidden_states=True, use_cache=False)
        for tap, layer_id in enumerate(smollm.layer_ids):
            mine = reading.hidden[start : start + len(ids), tap]
            assert float(distances(mine, stock.hidden_states[layer_id + 1][0]).max()) < 1e-5
        start += len(ids)
    assert start == len(reading.hidden)


def our_first_block_logits(drafter: Drafter, target: FrozenTarget, prompt: list[int]) -> Tensor:
    ids = torch.tensor([prompt])
    choice = drafter.shape.choice
    with torch.inference_mode():
        taps, final = target.read(ids)
        seen = torch.arange(len(prompt))[None]
        block = torch.full((1, choice.block_size), choice.mask_token_id)
        block[:, 0] = target.head(final[:, -1]).argmax(-1)
        anchor = torch.tensor([len(prompt)])
        context, valid = drafter.read_context(taps, seen), torch.ones_like(seen).bool()
        hidden = fill_blocks(drafter, target.embeddings(block), anchor, context, seen, valid)
        return target.head(hidden[0, 1:])


def steps_of(drafter: Drafter, target: FrozenTarget, prompt: list[int], reference: list[int]) -> int:
    """Steps of our own loop, which must say the same."""
    (trace,) = decode(TreeSession(target), DFlashProposer(drafter, target), [prompt], NEW, EOS)
    assert trace.tokens == reference
    return len(trace.steps)


def test_zlabs_own_code_loads_the_export_and_agrees(
    smoke: Workspace,
    smollm_folder: Path,
    smollm: FrozenTarget,
    trained: Drafter,
    prompts: list[list[int]],
    references: list[list[int]],
    tmp_path: Path,
) -> None:
    subprocess.run(["make", "--no-print-directory", ".peers/zlab/complete"], cwd=ROOT, check=True)
    few = prompts[:2]
    (tmp_path / "prompts.json").write_text(json.dumps(few))
    python, peer = ROOT / ".peers/zlab/bin/python", ROOT / "tests/oracle/zlab_peer.py"
    exported, out = smoke.path / "data/export/zlab", tmp_path / "out.safetensors"
    arguments = [smollm_folder, exported, tmp_path / "prompts.json", NEW, out]
    subprocess.run([python, "-W", "ignore", peer, *map(str, arguments)], check=True)
    found = load_file(out)
    for index, (prompt, reference) in enumerate(zip(few, references, strict=False)):
        assert found[f"tokens.{index}"].tolist() == reference
        assert found[f"steps.{index}"] == steps_of(trained, smollm, prompt, reference)
        ours = our_first_block_logits(trained, smollm, prompt)
        torch.testing.assert_close(found[f"logits.{index}"], ours, rtol=1e-5, atol=1e-4)


def test_speculators_own_code_loads_the_export_and_its_conversions_and_agrees(
    smoke: Workspace, smollm_folder: Path, trained: Drafter, tmp_path: Path
) -> None:
    """As exported; converted from z-lab's layout; and z-lab's from that, which is to the byte what was exported."""
    subprocess.run(["make", "--no-print-directory", ".peers/speculators/complete"], cwd=ROOT, check=True)
    interface = read_interface(smoke.path / "data/target")
    sample = load_file(smoke.path / "data/drafter/sample.safetensors")
    ours = draft_logits(trained, interface, sample)
    exported = smoke.path / "data/export"
    to_speculators(exported / "zlab", tmp_path / "converted", interface)
    to_zlab(tmp_path / "converted", tmp_path / "back")
    for name in (WEIGHTS, CONFIG):  # so z-lab's own code, which agrees on what was exported, agrees on this
        assert (tmp_path / "back" / name).read_bytes() == (exported / "zlab" / name).read_bytes()
    python, peer = ROOT / ".peers/speculators/bin/python", ROOT / "tests/oracle/speculators_peer.py"
    for number, folder in enumerate((exported / "speculators", tmp_path / "converted")):
        there = shutil.copytree(folder, tmp_path / f"served-{number}", copy_function=shutil.copyfile)
        config = json.loads((there / CONFIG).read_text())
        config["speculators_config"]["verifier"]["name_or_path"] = str(smollm_folder)  # a package is no target to it
        (there / CONFIG).write_text(json.dumps(config))
        arguments = [there, smoke.path / "data/drafter/sample.safetensors", tmp_path / f"{number}.safetensors"]
        subprocess.run([python, "-W", "ignore", peer, *map(str, arguments)], check=True)
        found = load_file(tmp_path / f"{number}.safetensors")
        assert found["taps"].tolist() == [layer_id + 1 for layer_id in trained.shape.target_layer_ids]
        torch.testing.assert_close(found["logits"], ours, rtol=1e-5, atol=1e-4)


def test_transformers_own_loop_loads_the_export_and_agrees(
    smoke: Workspace, smollm: FrozenTarget, trained: Drafter, prompts: list[list[int]], references: list[list[int]]
) -> None:
    from transformers import AutoModel

    exported = smoke.path / "data/export/transformers"
    assistant: Any = AutoModel.from_pretrained(exported, dtype=torch.float32)
    passes: list[int] = []
    counting = smollm.model.register_forward_hook(lambda *_: passes.append(1))
    for prompt, reference in zip(prompts, references, strict=True):
        ids = torch.tensor([prompt])
        passes.clear()
        said = smollm.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=assistant,
            speculation_type="dflash",
            max_new_tokens=NEW,
            do_sample=False,
        )
        assert said[0, len(prompt) :].tolist() == reference
        theirs = len(passes)
        assert theirs == 1 + steps_of(trained, smollm, prompt, reference), "the prompt's pass, and one a step"
    counting.remove()
    ids = torch.tensor([prompts[0]])
    with torch.inference_mode():
        taps, final = smollm.read(ids)
        block = torch.full((1, 4), 16)
        block[:, 0] = smollm.head(final[:, -1]).argmax(-1)
        hidden = assistant(
            noise_embeds=smollm.embeddings(block), context_hidden_states=taps.flatten(2)
        ).last_hidden_state
        logits = smollm.head(hidden[0, 1:])
    torch.testing.assert_close(logits, our_first_block_logits(trained, smollm, prompts[0]), rtol=1e-5, atol=1e-4)
