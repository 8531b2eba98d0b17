"""The ``card`` stage: a model card for each exported layout, from what was measured."""

from pathlib import Path
from typing import Any

from foredraft.artifacts import Manifest, open_artifact, publish
from foredraft.export.config import CardConfig
from foredraft.export.serving import KNOWN, commands
from foredraft.layouts.names import served_name


def write_cards(
    config: CardConfig,
    params: dict[str, Any],
    exported: Path,
    evaluated: dict[str, Any],
    trained: dict[str, Any],
    out: Path,
) -> None:
    """Publish ``<layout>.md`` of every exported layout as the artefact ``out``.

    Args:
        params: the whole params file.
        evaluated, trained: what ``evaluate`` and ``train`` measured.

    Raises:
        ArtifactError: the export is missing or damaged.
        ValueError: the figures are not those of a whole run.
    """
    manifest = open_artifact(exported, "export", "dvc repro export")
    layouts = sorted({name.partition("/")[0] for name in manifest.files})
    with publish(out, Manifest("card", contract=manifest.contract, facts={"export": manifest.fingerprint})) as folder:
        for layout in layouts:
            try:
                text = card(config, params, manifest.contract, layout, evaluated, trained)
            except (KeyError, TypeError, AttributeError) as error:
                told = f"{type(error).__name__}: {error}"
                raise ValueError(f"the metrics are not those of a whole run ({told}): dvc repro evaluate") from error
            (folder / f"{layout}.md").write_text(text, encoding="utf-8")


def card(
    config: CardConfig,
    params: dict[str, Any],
    contract: dict[str, Any],
    layout: str,
    evaluated: dict[str, Any],
    trained: dict[str, Any],
) -> str:
    """The card of one layout, as the hub reads it."""
    target, drafter, settings = public_name(contract["target"]), params["train"]["drafter"], evaluated["settings"]
    served = commands(layout, target, config.name, drafter["block_size"], drafter.get("sliding_window") is not None)
    # A folder on this machine is nobody else's business.
    told = target if contract["target"].startswith("file:") else contract["target"]
    title, commit = told.partition("@")[0].removeprefix("hf:"), trained["commit"] or "unknown"
    language = "python" if layout == "transformers" else "bash"
    return f"""{front_matter(config, contract["target"])}
# {config.name}

A DFlash drafter (arXiv 2602.06036) for `{title}`: it fills a block of {drafter["block_size"] - 1} drafts at once
from the target's hidden states, and the target verifies them in one step. What is committed is the target's own.

| | |
|---|---|
| target | `{told}`, digest `{contract["target_digest"][:16]}` |
| thinking mode | {"on" if contract["thinking"] else "off"} |
| taps | {", ".join(map(str, contract["target_layer_ids"]))} (residual stream after these 0-based blocks) |
| mask token | {contract["mask_token_id"]} |
| parameters | {trained["parameters"]:,} |

## What it is worth

Tokens that one step of the target commits, its own included; greedy, {settings["dtype"]}; 95 % intervals over prompts.

{figures(evaluated)}

## Serving

{note(layout, target, contract["target"])}```{language}
{served}
```

{KNOWN[layout]}

## Training

{trained["documents"]} documents, {trained["steps"]} steps; {recipe(params["train"])}. Commit {commit}.

| source | kind | licence | answers |
|---|---|---|---|
{sources(params["sources"], contract["response_origin"])}
"""


def public_name(uri: str) -> str:
    """What the card calls a target: a hub's name, or a folder of the reader's."""
    return f"path/to/{Path(uri).name}" if uri.startswith("file:") else served_name(uri)


def note(layout: str, target: str, uri: str) -> str:
    """What someone must know of the serving commands first."""
    if uri.startswith("hf:"):
        return ""
    told = f"`{target}` is a folder with the target, in Transformers' format."
    if layout == "speculators":
        told += " Write yours into `config.json` first: `speculators_config.verifier.name_or_path`."
    return told + "\n\n"


def front_matter(config: CardConfig, uri: str) -> str:
    """The metadata that the hub reads."""
    lines = [f"base_model: {served_name(uri)}"] if uri.startswith("hf:") else []
    lines += ["tags: [dflash, speculative-decoding]"]
    lines += [f"license: {config.licence}"] if config.licence else []
    return "\n".join(["---", *lines, "---"])


def figures(evaluated: dict[str, Any]) -> str:
    """Tokens per step by benchmark, beside prompt lookup."""
    lookup = evaluated["baselines"]["prompt_lookup"]
    rows = ["| benchmark | prompts | tokens per step | prompt lookup |", "|---|---|---|---|"]
    for name in [*sorted(lookup.keys() - {"pooled"}), "pooled"]:
        found, interval = evaluated[name], evaluated[name]["interval"]
        told = f" ({interval['low']:.2f} to {interval['high']:.2f})" if interval else ""
        rows.append(
            f"| {name} | {found['prompts']} | {found['tokens_per_step']:.2f}{told} | {lookup[name]['tokens_per_step']:.2f} |"
        )
    return "\n".join(rows)


def recipe(train: dict[str, Any]) -> str:
    """The training in a line."""
    loss = train["loss"]
    terms = ", ".join(f"{name} {loss[name]:g}" for name in ("ce", "kl", "tv") if loss[name])
    weights = f"D-PACE {loss['alpha']:g}" if loss["weights"] == "dpace" else f"decay {loss['gamma']:g}"
    return (
        f"{train['optimizer']} at {train['lr']:g} ({train['schedule']}), from {Path(train['start']).name}, "
        f"{train['epochs']} epochs, "
        f"loss {terms} on {loss['labels'].replace('_', ' ')}, {weights}"
    )


def sources(params: dict[str, Any], origins: dict[str, str]) -> str:
    """The data mix, a row a source."""
    rows = []
    for name, source in sorted(params.items()):
        answers = {"keep": "as they came"}.get(origins.get(name, ""), "the target's own")
        licence = " ".join(source["licence"].replace("|", "\\|").split())
        rows.append(f"| {name} | {source['kind']} | {licence} | {answers} |")
    return "\n".join(rows)
