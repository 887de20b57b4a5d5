"""Print the table of docs/gpu.md: `PYTHONPATH=tests python tests/compiled/table.py`."""

from __future__ import annotations

import torch

from compiled import launches as l
from compiled.building import AMPERE, HOPPER, Built, build
from ridgeline.spec import Attention

UNITS = ("HGMMA", "IGMMA", "HMMA", "IMMA")
LOADS = ("LDGSTS", "LDG")


def cells(built: Built) -> str:
    """Return registers, bytes of the stack, shared KiB, the widest loads from global memory and the unit."""
    loads = sorted({n for n in built.instructions if n.startswith(LOADS) and n != "LDGDEPBAR"})
    wide = sum(built.instructions[n] for n in loads if ".128" in n)
    unit = next((name for name in UNITS if built.count(name)), "-")
    total = sum(built.instructions[n] for n in loads)
    return f"{built.registers} | {built.stack} | {built.shared / 1024:.0f} | {wide} of {total} | {unit}"


def main() -> None:
    """Compile the launches of an 8B model and print a line for each."""
    llama = Attention(32, 8, 128, 128**-0.5)
    cases = [
        (f"{name}, {tokens} tokens", launched)
        for name in ("plain", "fp8", "int8", "int4-128", "int4-asym") for tokens in (1, 64, 256)
        for launched in l.product(name, tokens)
    ]  # fmt: skip
    cases += [(f"{n} sequences, 1 token each", x) for n in (8, 600) for x in l.attention(llama, n, n, torch.float16)]
    cases += [("2 prompts of 1,024 tokens", x) for x in l.attention(llama, 2048, 2, torch.float16)]
    cases += [("8 tokens", launched) for launched in l.rows()]
    seen: set[str] = set()
    print("| kernel | case | GPU | registers | stack, bytes | shared, KiB | 16-byte loads | unit |")
    for case, launched in cases:
        if str(launched.key) in seen or (launched.kernel.fn.__name__ == "dense_product" and case == "8 tokens"):
            continue
        seen.add(str(launched.key))
        for target in (HOPPER, AMPERE):
            name = launched.kernel.fn.__name__
            print(f"| `{name}` | {case} | sm_{target.arch} | {cells(build(launched, target))} |", flush=True)


if __name__ == "__main__":
    main()
