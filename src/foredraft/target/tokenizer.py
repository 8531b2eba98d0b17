"""The target's tokenizer, from its artefact, for stages that need no torch."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer and its chat template."""
    return AutoTokenizer.from_pretrained(folder)
