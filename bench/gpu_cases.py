"""The cases of bench/gpu.py by stage, as tables. Each stage begins with what matters most."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product as pairs
from typing import NamedTuple

import gpu_kernels as k
import gpu_steps as s
import gpu_tilings as t
from gpu_kernels import Built
from gpu_machine import Machine
from gpu_steps import Bench, Gate, Measured

from ridgeline.spec.quant import Format, format_of


class Kernel(NamedTuple):
    """A kernel that runs alone."""

    name: str
    build: Callable[[Machine], Built]


class Whole(NamedTuple):
    """A measurement of the engine, and its gate."""

    name: str
    gate: Callable[[Bench], Gate]
    measure: Callable[[Bench], Measured]


class Command(NamedTuple):
    """A program that checks answers. Words with {device} get the device's name."""

    name: str
    words: Sequence[str]


Case = Kernel | Whole | Command

# Rows and columns of the matrices of an 8B model, and small ones for the interpreter.
MATRICES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
SMALL_MATRICES = {"odd": (100, 257)}
HEADS, SMALL_HEADS = (32, 8, 128), (4, 2, 16)  # heads of queries and of keys, and their size
FEW, MANY = (1, 2, 4, 8, 16, 32, 64), (1024, 4096)
FORMATS = ("plain", "fp8", "int8", "int4-128")
TORCH_FORMATS = ("plain", "int8", "fp8-fp8")
TUNED = {"plain": "bfloat16", "fp8": "fp8", "int8": "bytes", "int4-128": "nibbles"}  # and the kinds of their codes
BATCHES = (1, 8, 64, 256)
LONG = ((1, 131072), (8, 131072), (128, 8192), (1, 32768))  # sequences, tokens of each
PROMPTS = (4096, 16384, 32768)


def products(backend: str, formats: Sequence[str], tokens: Sequence[int], *, small: bool) -> Iterator[Kernel]:
    """Yield products by tokens, so that a run that ends early has every matrix."""
    matrices = SMALL_MATRICES if small else MATRICES
    for count, format, (name, (rows, columns)) in pairs(tokens, formats, matrices.items()):
        if name == "head" and count > max(FEW):
            continue  # only the last token of a prompt needs the head
        yield Kernel(
            f"product {backend}, {format}, {name}, M {count}",
            lambda m, f=format, r=rows, c=columns, n=count: k.product(m, backend, f, r, c, n),
        )


def tilings(formats: Sequence[str], tokens: Sequence[int], *, small: bool) -> Iterator[Kernel]:
    """Yield products in each tiling; small: in two of them. Few tokens come first."""
    matrices = t.SMALL_MATRICES if small else t.MATRICES
    for count, format, (name, (rows, columns)) in pairs(tokens, formats, matrices.items()):
        kernel = t.kernel_of(Format() if format == "plain" else format_of(format))
        for block in list(t.candidates(kernel, count))[: 2 if small else None]:
            yield Kernel(
                t.name_of(format, name, count, block),
                lambda m, f=format, r=rows, c=columns, n=count, b=block: t.product(m, f, r, c, n, b),
            )


def attention(backend: str, sizes: Sequence[tuple[int, int, int]], *, small: bool) -> Iterator[Kernel]:
    """Yield attention over pages. sizes: sequences, tokens of each, and how many of them are queries."""
    for batch, context, tokens in sizes:
        yield Kernel(
            f"attention {backend}, {batch} x {context}, {tokens} queries",
            lambda m, b=batch, c=context, t=tokens: k.attention(m, backend, SMALL_HEADS if small else HEADS, b, c, t),
        )


def loads_of_keys(sizes: Sequence[tuple[int, int, int]], *, small: bool) -> Iterator[Kernel]:
    """Yield attention over pages of 64 tokens, whose keys come through pointers and through tensor descriptors."""
    heads = SMALL_HEADS if small else HEADS
    for (batch, context, tokens), backend in pairs(sizes, ("triton", "descriptors")):
        yield Kernel(
            f"attention {backend} over pages of 64, {batch} x {context}, {tokens} queries",
            lambda m, how=backend, b=batch, c=context, t=tokens: k.attention(m, how, heads, b, c, t, 64),
        )


def rows(*, small: bool) -> Iterator[Kernel]:
    width, vocabulary = (100, 257) if small else (4096, 128256)
    for tokens in (1,) if small else (1, 64):
        yield Kernel(f"norm triton, M {tokens}", lambda m, t=tokens: k.norm(m, "triton", t, width))
        yield Kernel(f"best triton, M {tokens}", lambda m, t=tokens: k.best(m, "triton", t, vocabulary))


def steps(
    models: Sequence[str], formats: Sequence[str], sizes: Sequence[tuple[int, int]], count: int
) -> Iterator[Whole]:
    for name, format, (batch, context) in pairs(models, formats, sizes):
        weights = "auto" if format == "plain" else format
        yield Whole(
            f"step {name}, {format}, batch {batch} at {context}",
            lambda b, n=name, w=weights: s.gate_of_steps(b, n, w),
            lambda b, n=name, w=weights, q=batch, c=context: s.decode(b, n, w, q, c, count),
        )


def loads(sizes: Sequence[tuple[int, int, int]]) -> Iterator[Whole]:
    for requests, prompt, new in sizes:
        yield Whole(
            f"throughput llama 8B, plain, {requests} requests of {prompt} and {new}",
            lambda b: s.gate_of_steps(b, "llama 8B", "auto"),
            lambda b, r=requests, p=prompt, n=new: s.throughput(b, "llama 8B", "auto", r, p, n),
        )


def _large(machine: Machine) -> Mapping[int, Sequence[Case]]:
    agree = Command("kernels agree", ("pytest", "-q", "-p", "no:xdist", "tests/gpu/test_kernels.py"))
    prompts = [Kernel(f"prompt torchlib, {n}", lambda m, n=n: k.prompts(m, HEADS, n)) for n in PROMPTS]
    return {
        1: [
            *products("torchlib", TORCH_FORMATS, (1, 64, *MANY), small=False),
            *products("mm in blocks", ("plain",), (1, 64, 1024), small=False),
            *prompts, agree,
        ],
        2: [
            *products("triton", FORMATS, FEW, small=False),
            *attention("triton", [(1, 512, 1), (8, 512, 1), (64, 512, 1), (8, 4096, 1)], small=False),
            *rows(small=False),
            *products("triton", FORMATS, MANY, small=False),
        ],
        3: [
            *steps(("llama 8B",), FORMATS, [(n, 512) for n in BATCHES], 24),
            *steps(("mamba2 2.7B",), ("plain",), [(64, 512), (256, 512)], 24),
        ],
        4: [
            *attention("triton", [(batch, context, 1) for batch, context in LONG], small=False),
            *attention("triton", [(1, n, n) for n in PROMPTS], small=False),
            *loads_of_keys([(1, 4096, 4096), (1, 32768, 32768), (8, 131072, 1)], small=False),
            *steps(("llama 8B",), ("plain",), [(1, 32768), (8, 32768)], 12),
        ],
        5: [*loads([(512, 1000, 1000)])],
        6: [
            Command("verify pocket", ("ridgeline", "verify", "pocket", "--device", "{device}")),
            Command("families", ("pytest", "-q", "-p", "no:xdist", "tests/gpu/test_families.py")),
        ],
        7: [*tilings(tuple(TUNED), t.TOKENS, small=False)],
    }  # fmt: skip


def _small(machine: Machine) -> Mapping[int, Sequence[Case]]:
    """Return one case of each kind, over tiny shapes."""
    return {
        1: [
            *products("torchlib", TORCH_FORMATS, (3,), small=True),
            *products("mm in blocks", ("plain",), (3,), small=True),
            Kernel("prompt torchlib, 63", lambda m: k.prompts(m, SMALL_HEADS, 63)),
            Command("kernels agree", ("ridgeline", "--version")),
        ],
        2: [
            *products("triton", FORMATS, (3,), small=True),
            *attention("triton", [(2, 63, 1)], small=True),
            *rows(small=True),
        ],
        3: [
            *steps(("llama 8B",), ("plain",), [(2, 20)], 1), *steps(("mamba2 2.7B",), ("plain",), [(2, 20)], 1),
        ],
        4: [
            *attention("triton", [(1, 100, 1), (1, 40, 40)], small=True), *loads_of_keys([(1, 70, 70)], small=True),
        ],
        5: [*loads([(3, 10, 4)])],
        6: [Command("verify", ("ridgeline", "doctor", "--device", "{device}", "--json"))],
        7: [*tilings(("plain", "int8"), (3,), small=True)],
    }  # fmt: skip


def stages(machine: Machine) -> Mapping[int, Sequence[Case]]:
    """Return the cases of each stage. A machine whose kernels are interpreted has small ones."""
    return _small(machine) if machine.is_small else _large(machine)


TITLES: Mapping[int, str] = {
    1: "torch's own kernels, and whether ours compile and agree", 2: "kernels at the shapes of an 8B model",
    3: "decode steps of the engine", 4: "long contexts", 5: "throughput", 6: "answers",
    7: "tilings of products",
}  # fmt: skip
