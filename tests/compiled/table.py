"""Print the table of docs/gpu.md: `PYTHONPATH=tests python tests/compiled/table.py [KERNEL ...]`."""

from __future__ import annotations

import sys

import torch

from compiled import launches as l
from compiled.building import AMPERE, HOPPER, UNITS, Built, Launched, build, disassemble
from compiled.test_compiled import ALONG, EXPERT_KERNELS, MIXERS
from ridgeline.spec import Attention, LatentAttention, MoE, RMSNorm, Rope
from ridgeline.spec.quant import PLAIN, format_of

LOADS = ("LDGSTS", "LDG")
# How products end.
ENDS = {"heads": "heads into pages", "activated": "SwiGLU", "whole heads": "norms of heads, pages in int8"}


def begin_of(launched: Launched) -> str:
    """Return how a product begins: with the norm of its tokens, or with nothing else."""
    return "norm before, " if launched.arguments.get("NORM") else ""


def facts(built: Built) -> tuple[str, ...]:
    """Return registers, bytes of the stack, KiB of shared memory, 16-byte loads of all, and the unit for matrices."""
    loads = {n: c for n, c in disassemble(built).items() if n.startswith(LOADS) and n != "LDGDEPBAR"}
    wide = sum(count for name, count in loads.items() if ".128" in name)
    unit = next((name for name in UNITS if built.has(name)), "none")
    return (
        str(built.registers), str(built.stack), f"{built.shared / 1024:.0f}", f"{wide} of {sum(loads.values())}", unit,
    )  # fmt: skip


def label(launched: Launched) -> str:
    """Return the case of a kernel over rows."""
    given = launched.arguments
    more = [str(given["NAME"])] if "NAME" in given else []
    more += [str(given["KIND"])] if given.get("KIND") in ("int8", "fp8") else []
    more += ["rounded to int8"] if given.get("ROUNDS") else []
    more += ["layer norm"] if given.get("IS_LAYER") else []
    more += ["token ids"] if given.get("HAS_IDS") else []
    more += ["drafts"] if given.get("HAS_TRIALS") else []
    return ", ".join(["8 tokens", *more])


def name_of(launched: Launched) -> str:
    """Return the name of a kernel."""
    return str(launched.kernel.fn.__name__)


def main() -> None:
    """Compile the launches of an 8B model and print a line for each."""
    llama = Attention(32, 8, 128, 128**-0.5)
    cases = [
        (f"{name}, {tokens} token{'s' * (tokens > 1)}", launched)
        for name in ("plain", "fp8", "int8", "int4-128", "int4-asym") for tokens in (1, 64, 256)
        for launched in l.product(name, tokens)
    ]  # fmt: skip
    cases += [
        (f"{name}, {tokens} token{'s' * (tokens > 1)}, {begin_of(x)}{ENDS[x.arguments['FINISH'][0]]}", x)
        for name in ("plain", "int8") for tokens in (1, 64, 256) for x in l.finished(name, tokens)
    ]  # fmt: skip
    cases += [(f"{n} sequences, 1 token each", x) for n in (8, 600) for x in l.attention(llama, n, n, torch.float16)]
    cases += [("2 prompts of 1,024 tokens", x) for x in l.attention(llama, 2048, 2, torch.float16)]
    cases += [("8 trees of 8 tokens", x) for x in l.attention(llama, 64, 8, torch.float16, is_tree=True)]
    for name, dtype in (("int8", torch.int8), ("fp8", torch.uint8), ("float32", torch.float32)):
        cases += [(f"2 prompts of 1,024 tokens, {name}", x) for x in l.attention(llama, 2048, 2, dtype)]
    deepseek = LatentAttention(128, 512, 128, 64, 128, 192**-0.5, RMSNorm(), 1536, Rope(64, interleaved=True))
    cases += [("latents of DeepSeek-V3, 100 tokens", x) for x in l.latents(deepseek, 100, 100, torch.bfloat16)]
    for name, dtype in (("bfloat16", torch.bfloat16), ("int8", torch.int8), ("fp8", torch.uint8)):
        (_, attended, _) = l.latents(deepseek, 2048, 2, dtype)
        cases.append((f"latents in {name}, 2 prompts of 1,024 tokens", attended))
    for tokens, is_paged, case in ((100, True, "100 tokens, latents"), (8, False, "8 tokens, latents"),
                                   (8, True, "queries into latents, 8 tokens")):  # fmt: skip
        cases += [(case, x) for x in l.latent_input(deepseek, 7168, tokens, is_paged=is_paged)[-1:]]
    cases += [("2 prompts of 1,024 tokens, descriptors", x)
              for x in l.attention(llama, 2048, 2, torch.bfloat16, 64, described=True)]  # fmt: skip
    for tokens in (8, 2048):
        for name, format in (("bfloat16", PLAIN), ("int4-128", format_of("int4-128"))):
            launches = l.experts(MoE(128, 8, 768), 2048, format, tokens)
            cases += [
                (f"128 experts in {name}, {tokens:,} tokens{', down' * bool(x.arguments.get('IS_DOWN'))}", x)
                for x in launches
                if name_of(x) in EXPERT_KERNELS
            ]
    for name, (mixer, width, _) in MIXERS.items():
        for shape, step in (((8, 1), "8 sequences, 1 token each"), ((1, 512), "512 tokens")):
            launches = l.recurrent(mixer, width, *shape)
            cases += [(f"{name}, {step}", x) for x in launches if name_of(x) in ALONG]
            ending = [x for x in launches if x.arguments.get("FINISH", ("",))[0] == "convolved"]
            cases += [(f"{name}'s input, {step}", x) for x in ending]
    cases += [(label(launched), launched) for launched in l.rows()]
    seen: set[str] = set()
    print("| kernel | case | registers | stack, bytes | shared, KiB | 16-byte loads | unit |")
    print("|---|---|---|---|---|---|---|")
    for case, launched in cases:
        name = name_of(launched)
        if len(sys.argv) > 1 and name not in sys.argv:
            continue
        if str(launched.key) not in seen and not (case.startswith("8 tokens") and name == "dense_product"):
            both = zip(*(facts(build(launched, target)) for target in (HOPPER, AMPERE)), strict=True)
            print(f"| `{name}` | {case} | {' | '.join(a if a == b else f'{a}, {b}' for a, b in both)} |", flush=True)
        seen.add(str(launched.key))


if __name__ == "__main__":
    main()
