"""Compile launches for GPUs that this machine does not have, and read what was compiled."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ridgeline.ops.triton.launch import Compiled

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
HOPPER, AMPERE, CDNA3 = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 80, 32), GPUTarget("hip", "gfx942", 64)
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int8: "*i8", torch.uint8: "*u8",
    torch.int32: "*i32", torch.int64: "*i64", torch.float64: "*fp64",
}  # fmt: skip
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9.]*)", re.MULTILINE)


@dataclass
class Launched:
    """A kernel that would have been launched."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    compiled: Compiled

    @property
    def key(self) -> tuple[Any, ...]:
        """All that the compiler sees of a launch."""
        source = source_of(self)
        return self.kernel.fn.__name__, source.signature, source.constants, source.attrs, self.compiled


@dataclass
class Recorder:
    """An `ops.triton.launch.Launch` that starts nothing."""

    launches: list[Launched] = field(default_factory=list)

    def __call__(self, kernel: Any, grid: tuple[int, ...], compiled: Compiled, **arguments: Any) -> None:
        self.launches.append(Launched(kernel, grid, arguments, compiled))

    @property
    def names(self) -> list[str]:
        return [launched.kernel.fn.__name__ for launched in self.launches]


@dataclass(frozen=True)
class Built:
    """A compiled kernel: registers of a thread, bytes of its stack, bytes of shared memory, and its instructions."""

    registers: int
    stack: int
    shared: int
    instructions: Counter[str]

    def count(self, *prefixes: str) -> int:
        return sum(n for name, n in self.instructions.items() if name.startswith(prefixes))

    @property
    def wide_loads(self) -> int:
        """Instructions that load 16 bytes from global memory for each thread."""
        return sum(n for name, n in self.instructions.items() if name.startswith(("LDG", "LDGSTS")) and ".128" in name)

    @property
    def loads(self) -> int:
        return self.count("LDG")


def source_of(launched: Launched) -> ASTSource:
    """Return the source of a launch, specialized as Triton specializes it: by ones and by multiples of 16."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launched.kernel.params):
        value, name = launched.arguments[parameter.name], parameter.name
        if isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[name], constants[(index,)] = "constexpr", value
        elif type(value) is int:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return ASTSource(fn=launched.kernel, signature=signature, constexprs=constants, attrs=attributes)


def compile_for(launched: Launched, target: GPUTarget) -> Any:
    options: dict[str, Any] = {"num_warps": launched.compiled.warps, "enable_fp_fusion": False}
    if target.backend == "cuda":
        options["num_stages"] = launched.compiled.stages
    return triton.compile(source_of(launched), target=target, options=options)


def build(launched: Launched, target: GPUTarget) -> Built:
    """Compile a launch for an NVIDIA GPU and disassemble it."""
    found = compile_for(launched, target)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [TOOL, "-sass", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert usage is not None, text[:300]
    instructions = Counter(INSTRUCTION.findall(text))
    return Built(int(usage[1]), int(usage[2]), found.metadata.shared, instructions)
