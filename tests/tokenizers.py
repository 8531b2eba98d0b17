"""Small real tokenizers: byte-level BPE with merges that cross borders, under templates of the shapes that are about."""

from functools import cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
CONTROL = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "thinking": ["<|im_start|>", "<|im_end|>"],
    "tagged": ["<|im_start|>", "<|im_end|>"],
    "headers": ["<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "alternating": ["<s>", "</s>", "[INST]", "[/INST]"],
}
NEWLINES_TOGETHER = r"[\r\n]+| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
END = {"headers": "<|eot_id|>", "alternating": "</s>"}
BEGIN = {"headers": "<|begin|>", "alternating": "<s>"}


@cache
def make_tokenizer(template: str, pad: str | None = "end") -> PreTrainedTokenizerFast:
    """A tokenizer trained on this repository's own words, with a template of ``tests/templates``.

    Where a text begins with a token of its own, the tokenizer would add it too, as Llama's does: a second one is a fault
    that must be possible. ``pad``: ``end`` makes the padding token the one that ends a turn; None leaves it out.
    """
    backend = Tokenizer(BPE(byte_fallback=False))
    # Where headers end in two newlines, tokenizers keep a run of newlines together; GPT-2's rule would split off the last.
    lines = [pre_tokenizers.Split(Regex(NEWLINES_TOGETHER), "isolated")] if template == "headers" else []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not lines)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*lines, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    words = [(TEMPLATES.parent.parent / name).read_text() for name in ("README.md", "CONTRIBUTING.md")]
    backend.train_from_iterator([*words, "assistant\n\n\nuser\n\n\n" * 50], trainer)
    end, begin = END.get(template, "<|im_end|>"), BEGIN.get(template)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, bos_token=begin, pad_token=end if pad == "end" else None
    )
    tokenizer.add_special_tokens({"additional_special_tokens": CONTROL[template]})
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    if begin:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.convert_tokens_to_ids(begin))]
        )
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return tokenizer


@cache
def make_spaced_tokenizer(template: str, scheme: str) -> PreTrainedTokenizerFast:
    """One as sentencepiece makes them: a space is a letter of its own, and one is put before a text (``first``) or before
    whatever follows a control token (``always``)."""
    backend = Tokenizer(BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    words = [(TEMPLATES.parent.parent / name).read_text() for name in ("README.md", "CONTRIBUTING.md")]
    backend.train_from_iterator(words, trainer)
    end, begin = END.get(template, "<|im_end|>"), BEGIN.get(template)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, bos_token=begin, unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": CONTROL[template]})
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return tokenizer
