"""Keep ``dvc.yaml`` in step with the code and with the sources of the params.

Two kinds of blocks in ``dvc.yaml`` are written by ``make sources`` and checked by the tests: the code that each stage
imports, and, where a stage reads what was made of every source, one dependency each. DVC has no lists of dependencies, and
one on ``data/features`` as a whole is unsafe: on a fresh clone it passes with no shard pulled.
"""

import re
import sys

from foredraft.artifacts import write_atomic
from foredraft.imports import ROOT, import_closure
from foredraft.params import read_params

BLOCK = re.compile(r"(?P<indent> *)# begin (?P<what>code|sources) (?P<word>\w+)\n.*?# end (?P=what)\n", re.DOTALL)


def synchronised(pipeline: str, sources: list[str]) -> str:
    """``pipeline``, the text of ``dvc.yaml``, with its generated blocks made anew."""

    def block(found: re.Match[str]) -> str:
        indent, what, word = found["indent"], found["what"], found["word"]
        if what == "code":
            closure = import_closure(ROOT / "stages" / f"{word}.py")
            lines = [str(path.relative_to(ROOT)) for path in closure]
        else:
            lines = [f"data/{word}/{source}" for source in sorted(sources)]
        body = "".join(f"{indent}- {line}\n" for line in lines)
        return f"{indent}# begin {what} {word}\n{body}{indent}# end {what}\n"

    return BLOCK.sub(block, pipeline)


def main(check: bool) -> None:
    """Rewrite ``dvc.yaml``, or with ``check`` only say whether it is in step."""
    path = ROOT / "dvc.yaml"
    before = path.read_text(encoding="utf-8")
    after = synchronised(before, list(read_params(ROOT / "params.yaml")["sources"]))
    if check and after != before:
        sys.exit("Error: dvc.yaml is not in step with the code or with params.yaml: run make sources, and commit")
    if after != before:
        write_atomic(path, after)
        print("dvc.yaml: written anew")


if __name__ == "__main__":
    main(check="--check" in sys.argv[1:])
