"""List the kinds of machines, the contenders and their settings, the cases and the goals as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from peer_shapes import CONFIGS, DENSE

OURS = "ridgeline"
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Machine(NamedTuple):
    """A kind of machine. flags: the features that its processors have. goals: the column of goals that it is measured
    with.
    """

    name: str
    title: str
    flags: frozenset[str]
    goals: str


AMX, VNNI = "amx", "avx512-vnni"
MACHINES = (  # the first kind whose features a processor has
    Machine(AMX, "AMX", frozenset(("amx_int8", "amx_bf16", "avx512_vnni")), AMX),
    Machine(VNNI, "AVX-512 with VNNI", frozenset(("avx512_vnni",)), VNNI),
    Machine("avx512", "AVX-512 without VNNI", frozenset(("avx512bw",)), VNNI),
    Machine("avx2", "AVX2", frozenset(("avx2", "fma")), VNNI),
    Machine("other", "other instructions", frozenset(), VNNI),
)


def machine_of(flags: Iterable[str]) -> Machine:
    """Return the kind of a machine from the features that its system states."""
    there = frozenset(flags)
    return next(machine for machine in MACHINES if machine.flags <= there)


def cpu_flags() -> list[str]:
    """Return the features of this processor as Linux states them; none elsewhere."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])


class Setting(NamedTuple):
    """One way to run a program. machines: kinds on which it may help. variables: for its environment. options: further
    arguments of its driver. kinds: types of weights for which it may help; empty: all.
    """

    machines: tuple[str, ...]
    variables: Mapping[str, str] = NOTHING
    options: Mapping[str, Any] = NOTHING
    kinds: tuple[str, ...] = ()


UNIT: Mapping[str, str] = MappingProxyType({"RIDGELINE_MATRIX_UNIT": "auto"})
# As peers have them: transformers in bf16 rounds all that it computes, and others compute attention in 16 bits.
ROUNDED: Mapping[str, Any] = MappingProxyType({"activations": "bf16"})
ATTENTION: Mapping[str, Any] = MappingProxyType({"attention": "bf16"})
BOTH: Mapping[str, Any] = MappingProxyType({**ROUNDED, **ATTENTION})


def openvino(**properties: str) -> Mapping[str, Any]:
    return {"properties": properties}


# Settings beside the default, by peer. The best figure of a program's settings counts.
SETTINGS: Mapping[str, Mapping[str, Setting]] = {
    OURS: {
        "matrix unit": Setting((AMX,), UNIT),
        "rounded tokens": Setting((AMX, VNNI), options=ROUNDED, kinds=("bf16",)),
        "rounded attention": Setting((AMX, VNNI), options=ATTENTION, kinds=("int8", "int4")),
        "rounded tokens and attention": Setting((AMX, VNNI), options=BOTH, kinds=("bf16",)),
        "matrix unit, rounded tokens": Setting((AMX,), UNIT, ROUNDED, ("bf16",)),
        "matrix unit, rounded attention": Setting((AMX,), UNIT, ATTENTION, ("int8", "int4")),
        "matrix unit, rounded tokens and attention": Setting((AMX,), UNIT, BOTH, ("bf16",)),
    },
    "llama.cpp": {"without repacking": Setting((AMX,), options={"repack": False})},
    "openvino": {
        "bf16": Setting((AMX,), options=openvino(INFERENCE_PRECISION_HINT="bf16")),
        "f32": Setting((AMX, VNNI), options=openvino(INFERENCE_PRECISION_HINT="f32")),
        "rounded tokens": Setting(
            (AMX,), options=openvino(INFERENCE_PRECISION_HINT="f32", DYNAMIC_QUANTIZATION_GROUP_SIZE="32")
        ),
    },
    # torch computes bfloat16 with oneDNN where a processor has AVX-512; elsewhere widened weights are faster.
    "transformers": {"widened": Setting((VNNI, "avx512", "avx2"), options={"widened": True})},
}


class Contender(NamedTuple):
    """A program in one format. kind: int8, int4, bf16 or fp32, within which it is compared. tool: name of its scripts
    in peer_drivers/. converter: the environment in which its model is written; empty if it reads the Hugging Face
    folder. setting: one of SETTINGS, or empty for the default.
    """

    peer: str
    form: str
    kind: str
    tool: str
    converter: str = ""
    setting: str = ""

    @property
    def base(self) -> str:
        return f"{self.peer} {self.form}"

    @property
    def name(self) -> str:
        return f"{self.base} [{self.setting}]" if self.setting else self.base

    @property
    def how(self) -> Setting:
        return SETTINGS[self.peer][self.setting] if self.setting else Setting(())


CONTENDERS = (
    Contender(OURS, "int8", "int8", "ridgeline"),
    Contender(OURS, "int4", "int4", "ridgeline"),
    Contender(OURS, "bf16", "bf16", "ridgeline"),
    Contender(OURS, "fp32", "fp32", "ridgeline"),
    Contender("llama.cpp", "Q8_0", "int8", "llama_cpp", "llama.cpp"),
    Contender("llama.cpp", "Q4_0", "int4", "llama_cpp", "llama.cpp"),
    Contender("openvino", "int8", "int8", "openvino", "openvino-convert"),
    Contender("openvino", "int4", "int4", "openvino", "openvino-convert"),
    Contender("ctranslate2", "int8", "int8", "ctranslate2", "ctranslate2"),
    Contender("onnxruntime", "int4", "int4", "onnxruntime", "onnxruntime-convert"),
    Contender("transformers", "bf16", "bf16", "transformers"),
    Contender("transformers", "fp32", "fp32", "transformers"),
)
PEERS = tuple(dict.fromkeys(c.peer for c in CONTENDERS if c.peer != OURS))


def contenders_on(machine: str) -> list[Contender]:
    """Return every program in every format and setting that is measured on a kind of machine."""
    return [
        contender._replace(setting=setting)
        for contender in CONTENDERS
        for setting in ("", *(name for name, s in SETTINGS.get(contender.peer, {}).items() if machine in s.machines))
        if not setting or contender.kind in (SETTINGS[contender.peer][setting].kinds or (contender.kind,))
    ]


QUANTIZED = ("int8", "int4")
KINDS = (*QUANTIZED, "bf16", "fp32")
OTHERS = tuple(shape for shape in CONFIGS if shape not in DENSE)


class Case(NamedTuple):
    """A run: number of sequences, tokens of each prompt, tokens of each answer. longer: other numbers of answer tokens
    by shape. shapes, kinds: which of them are measured.
    """

    sequences: int
    prompt: int
    tokens: int
    longer: Mapping[str, int] = NOTHING
    shapes: tuple[str, ...] = tuple(CONFIGS)
    kinds: tuple[str, ...] = KINDS

    def has(self, shape: str, kind: str) -> bool:
        """Return whether a kind of a shape is measured. Experts and recurrent layers run in 16 bits or fewer."""
        return shape in self.shapes and kind in self.kinds and not (shape in OTHERS and kind == "fp32")

    def answer(self, shape: str) -> int:
        """Return the tokens of each answer."""
        return int(self.longer.get(shape, self.tokens))

    def room(self, shape: str) -> int:
        """Return the tokens that a program must be able to keep."""
        needed = self.sequences * (self.prompt + self.answer(shape))
        return MAX_TOKENS if needed <= MAX_TOKENS else -(-needed // 1024) * 1024


CASES = {
    "decode": Case(1, 128, 33, {"S": 65, "mamba2": 65}),
    "prefill": Case(1, 512, 1),
    "prompt2048": Case(1, 2048, 1, shapes=("S", "M"), kinds=QUANTIZED),
    "prompt8192": Case(1, 8192, 1, shapes=("M",), kinds=QUANTIZED),
    "batch8": Case(8, 32, 17, {"S": 33}),
    "batch32": Case(32, 32, 9, {"S": 17}),
}
MEMORY = Case(1, 128, 17)  # a prompt of 128 tokens and 16 answers, for the peak memory
PROMPTS = ("prefill", "prompt2048", "prompt8192")  # cases whose figure is the speed of the prompt
LOAD, RESIDENT, STARTUP, SIZE, PRODUCTS = "load", "resident", "startup", "size", "products"
# Each contender reserves memory for these sizes, or for one longer prompt: 32 sequences of 64 tokens, or one of 2,048.
MAX_SEQS, MAX_TOKENS = 32, 2048
# Resident memory is measured after 200 such prompts, one after the other.
RESIDENT_PROMPTS, RESIDENT_CASE = 200, Case(1, 64, 4, shapes=DENSE, kinds=QUANTIZED)
RESIDENT_PEERS = (OURS, "llama.cpp")

Limits = Mapping[str, Mapping[str, float]]  # column of goals -> shape -> limit


class Bar(NamedTuple):
    """A goal.

    value: name of the figure in a result. limits: for each column of goals and shape. over: "peer" for the best peer of
    the kind, the name of a peer, "int8" for our own int8, or "" for the figure itself. at_most: whether the limit is
    one from above. shares: a share of the read limit, by kind, with which the goal is met too.
    """

    case: str
    value: str
    kinds: tuple[str, ...]
    over: str
    limits: Limits
    at_most: bool = False
    shares: Mapping[str, float] = NOTHING


def goals(amx: float, vnni: float, shapes: Iterable[str] = DENSE) -> Limits:
    return {AMX: dict.fromkeys(shapes, amx), VNNI: dict.fromkeys(shapes, vnni)}


def by_size(amx: tuple[float, float, float], vnni: tuple[float, float, float]) -> Limits:
    return {AMX: dict(zip(DENSE, amx, strict=True)), VNNI: dict(zip(DENSE, vnni, strict=True))}


EVERY = tuple(CONFIGS)
SHARES = {"int8": 0.92, "int4": 0.85, "bf16": 0.90}
BARS = (
    Bar(PRODUCTS, "unit_share", ("int8",), "", {AMX: {"M": 0.45}}),
    Bar(PRODUCTS, "unit_share", ("bf16",), "", {AMX: {"M": 0.25}}),
    Bar(PRODUCTS, "peak_share", ("int8", "bf16"), "", {VNNI: {"M": 0.85}}),
    Bar("prefill", "tokens_per_s", QUANTIZED, "peer", goals(1.5, 1.3)),
    Bar("prompt2048", "tokens_per_s", QUANTIZED, "peer", goals(1.5, 1.3, ("S", "M"))),
    Bar("prompt8192", "tokens_per_s", QUANTIZED, "peer", goals(1.5, 1.3, ("M",))),
    Bar("prefill", "tokens_per_s", ("bf16",), "transformers", goals(1.1, 1.2)),
    Bar("decode", "first_token_ms", (*QUANTIZED, "bf16"), "peer", goals(1.5, 1.4)),
    *(Bar("decode", "read_share", (kind,), "", goals(share, share)) for kind, share in SHARES.items()),
    Bar("decode", "tokens_per_s", ("int8",), "peer", by_size((2.0, 1.2, 1.1), (1.5, 1.35, 1.25)), shares=SHARES),
    Bar("decode", "tokens_per_s", ("int4",), "peer", by_size((2.2, 1.15, 1.05), (1.6, 1.4, 1.3)), shares=SHARES),
    # Experts and recurrent layers have no goal of their own for one sequence: they keep their lead.
    Bar("decode", "tokens_per_s", QUANTIZED, "peer", goals(1, 1, OTHERS)),
    Bar("prefill", "tokens_per_s", QUANTIZED, "peer", goals(1, 1, OTHERS)),
    Bar("batch8", "tokens_per_s", (*QUANTIZED, "bf16"), "peer", goals(1.8, 1.8, EVERY)),
    Bar("batch32", "tokens_per_s", (*QUANTIZED, "bf16"), "peer", goals(2.2, 1.8, EVERY)),
    Bar("batch8", "tokens_per_s", ("int4",), "int8", goals(1, 1, EVERY)),
    Bar("batch32", "tokens_per_s", ("int4",), "int8", goals(1, 1, EVERY)),
    Bar(RESIDENT, "resident_mb", QUANTIZED, "llama.cpp", goals(1.1, 1.1), at_most=True),
)
# The command for a start-up time, with its limit in seconds from process start to first token. "": the built-in model.
STARTUPS = (("", "", 0.7), ("S", "", 1.0), ("L", "int8", 2.0))
SIZE_MB = 180
LOWER_IS_BETTER = ("first_token_ms", "peak_mb", "resident_mb", "load_s")
