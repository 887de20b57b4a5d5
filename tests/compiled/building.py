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
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline.ops.triton.launch import Compiled

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
HOPPER, AMPERE, CDNA3 = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 80, 32), GPUTarget("hip", "gfx942", 64)
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int8: "*i8", torch.uint8: "*u8",
    torch.int32: "*i32", torch.int64: "*i64", torch.float64: "*fp64",
}  # fmt: skip
# Instructions of the machine, as cuobjdump prints them, and of PTX, from which ptxas makes them.
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9.]*)", re.MULTILINE)
VIRTUAL = re.compile(r"^\s*(?:@!?%p\d+ )?((?:ld\.global|cp\.async|wgmma\.mma_async|mma\.sync)[\w.:]*)", re.MULTILINE)
UNITS = {  # the PTX of each unit for matrices
    "HGMMA": re.compile(r"wgmma\..*f32\."), "IGMMA": re.compile(r"wgmma\..*s32\."),
    "HMMA": re.compile(r"mma\.sync.*f32\."), "IMMA": re.compile(r"mma\.sync.*s32\."),
}  # fmt: skip


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
    """A compiled kernel: registers of a thread, bytes of its stack, bytes of shared memory, and its PTX instructions.

    Numbers that spill from registers lie on the stack, so that a kernel without a stack has no spills.
    """

    registers: int
    stack: int
    shared: int
    instructions: Counter[str]
    cubin: bytes

    @property
    def wide_loads(self) -> int:
        """Instructions that load 16 bytes from global memory for each thread; cp.async.cg copies nothing else."""
        return sum(
            n for name, n in self.instructions.items()
            if name.startswith("cp.async.cg.") or (name.startswith("ld.") and name.endswith((".v4.b32", ".v2.b64")))
        )  # fmt: skip

    def has(self, unit: str) -> bool:
        return any(UNITS[unit].match(name) for name in self.instructions)


def source_of(launched: Launched) -> ASTSource:
    """Return the source of a launch, specialized as Triton specializes it: by ones and by multiples of 16."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launched.kernel.params):
        value, name = launched.arguments[parameter.name], parameter.name
        if isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{POINTERS[value.base.dtype][1:]}{value.block_shape}>"
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


def _inspect(cubin: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([TOOL, *options, file.name], capture_output=True, text=True, check=True).stdout


def build(launched: Launched, target: GPUTarget) -> Built:
    """Compile a launch for an NVIDIA GPU."""
    found = compile_for(launched, target)
    text = _inspect(found.asm["cubin"], "-res-usage")
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert usage is not None, text[:300]
    instructions = Counter(VIRTUAL.findall(found.asm["ptx"]))
    return Built(int(usage[1]), int(usage[2]), found.metadata.shared, instructions, found.asm["cubin"])


def disassemble(built: Built) -> Counter[str]:
    """Return the machine's instructions of a kernel. It takes as long as compiling does."""
    return Counter(INSTRUCTION.findall(_inspect(built.cubin, "-sass")))
