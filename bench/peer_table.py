"""List the contenders, the cases and the bars as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import peer_shapes

OURS = "ridgeline"


class Contender(NamedTuple):
    """A program in one format. kind: int8, int4, bf16 or fp32, within which it is compared. tool: name of its scripts
    in peer_drivers/. converter: the environment in which its model is written; empty if it reads the Hugging Face
    folder.
    """

    peer: str
    form: str
    kind: str
    tool: str
    converter: str = ""

    @property
    def name(self) -> str:
        return f"{self.peer} {self.form}"


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


class Case(NamedTuple):
    """A run: number of sequences, tokens of each prompt, tokens of each answer."""

    sequences: int
    prompt: int
    tokens: Mapping[str, int]  # tokens of each answer by shape
    what: str


CASES = {
    "decode": Case(1, 128, {"S": 65, "M": 33, "L": 33}, "decode at batch 1 after 128 tokens, and their first token"),
    "prefill": Case(1, 512, {"S": 1, "M": 1, "L": 1}, "a prompt of 512"),
    "batch8": Case(8, 32, {"S": 33, "M": 17, "L": 17}, "decode of 8 sequences after 32 tokens"),
    "batch32": Case(32, 32, {"S": 17, "M": 9, "L": 9}, "decode of 32 sequences after 32 tokens"),
}
LOAD, STARTUP, SIZE = "load", "startup", "size"
# Each contender reserves memory for these sizes: 32 sequences of 64 tokens, or one of 2,048.
MAX_SEQS, MAX_TOKENS = 32, 2048


class Bar(NamedTuple):
    """A bound from below or above, by shape. value: name of the figure in a result. over: "peer" for the best peer of
    the kind, "llama.cpp", "read" for the share of the read bandwidth, "int8" for our own int8, or "" for the value
    itself.
    """

    case: str
    value: str
    kinds: tuple[str, ...]
    over: str
    limits: Mapping[str, float]
    at_most: bool = False


def all_of(limit: float) -> dict[str, float]:
    return dict.fromkeys("SML", limit)


QUANTIZED = ("int8", "int4")
PROMPTS = {"S": 1.8, "M": 1.8, "L": 1.5}
BARS = (
    Bar("decode", "read_share", ("int8", "int4", "bf16"), "", {"S": 0.8, "M": 0.9, "L": 0.9}),
    Bar("decode", "tokens_per_s", ("int8",), "peer", {"S": 1.5, "M": 1.6, "L": 1.25}),
    Bar("decode", "tokens_per_s", ("int4",), "peer", {"S": 1.5, "M": 1.6, "L": 1.8}),
    Bar("prefill", "tokens_per_s", QUANTIZED, "peer", PROMPTS),
    Bar("prefill", "tokens_per_s", ("fp32",), "peer", all_of(0.95)),
    Bar("decode", "first_token_ms", QUANTIZED, "peer", PROMPTS),
    Bar("decode", "first_token_ms", ("fp32",), "peer", all_of(0.95)),
    Bar("batch8", "tokens_per_s", QUANTIZED, "peer", all_of(1.8)),
    Bar("batch32", "tokens_per_s", QUANTIZED, "peer", all_of(1.8)),
    Bar("batch8", "tokens_per_s", ("int4",), "int8", all_of(1.0)),
    Bar("batch32", "tokens_per_s", ("int4",), "int8", all_of(1.0)),
    Bar("load", "peak_mb", QUANTIZED, "llama.cpp", all_of(1.15), at_most=True),
)
# The command for a start-up time, with its limit in seconds from process start to first token. "": the built-in model.
STARTUPS = (("", "", 0.7), ("S", "", 1.0), ("L", "int8", 2.0))
SIZE_MB = 180
LOWER_IS_BETTER = ("first_token_ms", "peak_mb", "load_s")


def weight_bytes(shape: str, kind: str) -> float:
    """Return the bytes of the matrices that a token reads, with their scales, at the bits of a kind: int8 has a float
    for each row, int4 a half for each 32 numbers.
    """
    numbers = peer_shapes.num_matrix_params(shape)
    rows = sum(s[0] for s in peer_shapes.tensors(peer_shapes.CONFIGS[shape]).values() if len(s) == 2)
    return {"fp32": 4.0 * numbers, "bf16": 2.0 * numbers, "int8": numbers + 4.0 * rows, "int4": numbers * 4.5 / 8}[kind]
