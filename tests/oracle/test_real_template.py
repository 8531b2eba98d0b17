"""The real target's own tokenizer and template: masks of kept answers, against what a server would be sent."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from foredraft.chat.render import Renderer
from foredraft.chat.supervise import Supervisor

pytestmark = pytest.mark.slow
TEXTS = [
    "Fine, thanks.",
    "\n\nA list:\n- one\n",
    "def f(x):\n    return x  # déjà vu\n",
    "42",
    " spaced ",
    "你好 🙂",
    "x\n\n\n\ny",
]


def test_masks_stand_on_the_prefix_that_a_server_sees(smollm_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm_folder)
    renderer = Renderer(tokenizer, thinking=False)
    assert renderer.tokens.by_width, "a byte-level vocabulary: places follow from lengths"
    assert (renderer.tools_as, renderer.calls_as) == ("system_text", "text"), "this template ignores both"
    supervisor = Supervisor(renderer, [tokenizer.eos_token_id], tokenizer.bos_token_id)
    for first in TEXTS:
        for second in TEXTS:
            messages = [
                {"role": role, "content": text}
                for role, text in zip(("user", "assistant") * 2, ("Hello", first, second, "Bye."), strict=True)
            ]
            prompts = [
                tokenizer.apply_chat_template(
                    messages[:turn], add_generation_prompt=True, tokenize=True, return_dict=True
                )["input_ids"]
                for turn in (1, 3)
            ]
            documents = supervisor.documents(messages, [])
            spans = [(document, span) for document in documents for span in document.spans]
            assert [document.ids[: span[0]] for document, span in spans] == prompts
            said = [tokenizer.decode(document.ids[slice(*span)]) for document, span in spans]
            assert said == [f"{first}<|im_end|>", "Bye.<|im_end|>"]
