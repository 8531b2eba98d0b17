"""How an exported drafter is served: the one source of the commands in the model card and in the README.

usage: python -m foredraft.export.serving README.md     (writes its commands anew)

Engines count differently: vLLM counts drafts, SGLang the slots of a block, its anchor included.
"""

import json
import re
import sys
from pathlib import Path

from foredraft.artifacts import write_atomic

BLOCK = re.compile(r"(<!-- begin serving -->\n).*?(<!-- end serving -->)", re.DOTALL)
KNOWN = {
    "zlab": "z-lab's dflash 0.1.0 loads this layout and gives the same logits and answers (tested); where the target has "
    "recurrent layers its own loop is not lossless, since rejected drafts stay in their states. vLLM and SGLang are not run "
    "by the project's tests: compare the accepted length that they log with the figures above. vLLM from before its pull "
    "request 40727 reads the taps one block early, which costs some 3 % and says nothing.",
    "speculators": "speculators 0.9.0 loads this layout and gives the same logits (tested). vLLM, which recognises it by "
    "itself, is not run by the project's tests: compare the accepted length that it logs with the figures above.",
    "transformers": "Transformers 5.24 loads this layout and gives the same answers in as many steps (tested). It refuses "
    "targets with recurrent layers.",
}
"""What is known of engines' versions, by layout."""


def commands(layout: str, target: str, drafter: str, block_size: int, windows: bool) -> str:
    """Shell or Python that serves ``drafter``, a folder or a hub's name, beside ``target``."""
    # Layers that slide beside one that does not are read by vLLM's second runner alone.
    runner = "VLLM_USE_V2_MODEL_RUNNER=1 " if windows else ""
    if layout == "speculators":
        return f"{runner}vllm serve {drafter}"
    if layout == "transformers":
        return (
            "from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer\n\n"
            f'target = AutoModelForCausalLM.from_pretrained("{target}")\n'
            f'drafter = AutoModel.from_pretrained("{drafter}", dtype=target.dtype)\n'
            f'inputs = AutoTokenizer.from_pretrained("{target}")("What is 2 + 2?", return_tensors="pt")\n'
            'target.generate(**inputs, assistant_model=drafter, speculation_type="dflash", do_sample=False)'
        )
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": block_size - 1}
    return (
        f"{runner}vllm serve {target} --speculative-config '{json.dumps(speculative)}'\n"
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {drafter} --speculative-num-draft-tokens {block_size}\n"
        f"dflash generate transformers 'What is 2 + 2?' --model {target} --draft {drafter}"
    )


def readme(text: str) -> str:
    """``text`` with its commands written anew, for a drafter with blocks of 16."""
    body = "".join(
        f"```{'python' if layout == 'transformers' else 'bash'}\n"
        f"{commands(layout, 'org/target', f'data/export/{layout}', 16, windows=False)}\n```\n"
        for layout in KNOWN
    )
    return BLOCK.sub(lambda found: found[1] + body + found[2], text)


def main(path: Path) -> None:
    """Write the commands of a file anew."""
    write_atomic(path, readme(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
