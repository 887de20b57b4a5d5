"""The cases of bench/formats.py as data: files of tools, files of ours, and methods that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

GROUP = 32  # columns that share a scale
LOGITS, KL = 1e-3, 1e-3  # bars: largest difference of a logit; mean KL where a tie in rounding moves logits
SHARE = 1.05  # bar of our KL as a share of the other tool's


@dataclass(frozen=True)
class Case:
    """One file, which a tool writes or we write, and the tool that says which logits it has.

    Attributes:
        tool: the environment in bench/peer_envs.py.
        task: the function in peer_drivers/drive_formats.py that writes the file, or loads ours.
        bar: whether logits are compared, or their KL.
        scheme: arguments of `ridgeline.compress.quantize` for a file of ours; empty for one of the tool.
        options: arguments of the task.
        load: a task that gives the logits of a file that the tool wrote; empty if the task that writes it does.
        activations: how we take activations for this comparison; None: as the file says. Where the tool rounds them in
            another way than we do, only the matrices are compared in this way, and its own products by KL.
        theirs: why the tool cannot load the file, or not with the right logits; empty if it can.
    """

    name: str
    tool: str
    task: str
    bar: Literal["logits", "KL"] = "logits"
    scheme: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    load: str = ""
    activations: Literal["exact"] | None = None
    theirs: str = ""

    @property
    def folder(self) -> str:
        """The name of the file's folder."""
        return "".join(c if c.isalnum() else "-" for c in self.name)


def _gptqmodel(name: str, **options: Any) -> Case:
    options = {"bits": 4, "group_size": GROUP, "sym": False, **options}
    return Case(f"GPTQModel {name}", "gptqmodel", "gptqmodel_write", options=options, load="gptqmodel_load")


def _weights(**more: Any) -> dict[str, Any]:
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "dynamic": False}
    return {"weights": {**args, **more}}


def _llmcompressor(name: str, bar: Literal["logits", "KL"] = "logits", **options: Any) -> Case:
    return Case(f"llm-compressor {name}", "llm-compressor", "llmcompressor_write", bar, options=options)


def _bitsandbytes(name: str, **options: Any) -> Case:
    return Case(f"bitsandbytes {name}", "bitsandbytes", "bitsandbytes_write", options=options, activations="exact")


def _torchao(name: str, config: str, bar: Literal["logits", "KL"] = "logits", **more: Any) -> Case:
    return Case(f"torchao {name}", "torchao", "torchao_write", bar, options={"config": config, **more})


_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"}
DYNAMIC = {r"+:.*\.down_proj.*": {"bits": 8, "group_size": 64}, r"-:.*layers\.0\..*": {}}
# The preset FP8_BLOCK has blocks of 128, which must divide all sizes.
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_BLOCKS = {
    "weights": {**_FP8, "strategy": "block", "block_structure": [64, 64]},
    "input_activations": {**_FP8, "strategy": "group", "group_size": 64, "dynamic": True},
}
# Files of the tools, which we read.
READ = (
    _gptqmodel("4 bits"), _gptqmodel("2 bits", bits=2), _gptqmodel("3 bits", bits=3), _gptqmodel("8 bits", bits=8),
    _gptqmodel("4 bits symmetric, act-order", sym=True, desc_act=True),
    _gptqmodel("4 bits v2, act-order", format="gptq_v2", desc_act=True),
    _gptqmodel("4 bits, dynamic", sym=True, dynamic=DYNAMIC),
    _gptqmodel("AWQ", method="awq"),
    # bitsandbytes rounds activations to float16 first, and takes outliers by column of the whole batch.
    _bitsandbytes("int8", load_in_8bit=True), _bitsandbytes("nf4", **_NF4),
    _bitsandbytes("int8 without outliers", load_in_8bit=True, llm_int8_threshold=0.0),
    _bitsandbytes("nf4 nested", **_NF4, bnb_4bit_use_double_quant=True),
    _llmcompressor("W4A16", **_weights(symmetric=True)),
    _llmcompressor("W4A16 asymmetric", **_weights(symmetric=False)),
    _llmcompressor("W8A8", "KL", scheme="INT8"), _llmcompressor("FP8_DYNAMIC", "KL", scheme="FP8_DYNAMIC"),
    _llmcompressor("FP8_BLOCK", "KL", **_BLOCKS),
    _torchao("int8", "Int8WeightOnlyConfig"), _torchao("fp8", "Float8WeightOnlyConfig"),
    _torchao("4 bits", "IntxWeightOnlyConfig", weight_dtype="int4", granularity=GROUP),
    _torchao("W8A8", "Int8DynamicActivationInt8WeightConfig", "KL"),
    _torchao(
        "4 bits, activations in int8", "Int8DynamicActivationIntxWeightConfig", "KL", weight_dtype="int4",
        weight_granularity=GROUP,
    ),
)  # fmt: skip


def _ours(
    name: str, scheme: str, tool: str = "compressed-tensors", task: str = "transformers_load",
    bar: Literal["logits", "KL"] = "logits", theirs: str = "", exact: bool = False, **more: Any,
) -> Case:  # fmt: skip
    taken: Literal["exact"] | None = "exact" if exact else None
    return Case(f"our {name}", tool, task, bar, {"scheme": scheme, **more}, activations=taken, theirs=theirs)


def _ours_gptq(scheme: str, format: str, **more: Any) -> Case:
    return _ours(f"{format} {scheme}", scheme, "gptqmodel", "gptqmodel_load", format=format, group=GROUP, **more)


# Files of ours, which tools load.
WRITTEN = (
    _ours("compressed-tensors 4 bits", "rtn-int4", symmetric=True, format="compressed-tensors"),
    _ours("compressed-tensors 3 bits", "rtn-int3", symmetric=True, format="compressed-tensors"),
    _ours(
        "compressed-tensors 4 bits with zero points", "rtn-int4", format="compressed-tensors",
        theirs="transformers expects zero points that are not packed",
    ),
    _ours("compressed-tensors W8A8", "smooth-int8", bar="KL"),
    _ours("compressed-tensors fp8, rows, activations in fp8", "fp8", bar="KL", activations="fp8"),
    _ours("compressed-tensors fp8, blocks", "fp8-block"), _ours("compressed-tensors fp8, tensor", "fp8-tensor"),
    _ours("bitsandbytes int8", "llm.int8", "bitsandbytes", "bitsandbytes_load", exact=True, format="bitsandbytes"),
    _ours_gptq("gptq-int4", "gptq", symmetric=True), _ours_gptq("gptq-int8", "gptq", symmetric=True),
    _ours_gptq("gptq-int4", "gptq_v2"), _ours_gptq("gptq-int3", "gptq_v2"), _ours_gptq("gptq-int2", "gptq_v2"),
    _ours_gptq("awq-int4", "awq"),
)  # fmt: skip
# The name of a method -> its case in READ, and our scheme that is compared with it.
METHODS = {
    "GPTQ": ("GPTQModel 4 bits v2, act-order", "gptq-int4"), "AWQ": ("GPTQModel AWQ", "awq-int4"),
}  # fmt: skip
