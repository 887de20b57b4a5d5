"""The facts about quantized matrices that a checkpoint's config states, as data for the readers of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ridgeline.archs.config import Config
from ridgeline.spec.quant import LARGEST_GROUP, Activations, Format, NumberType

AT = "config.json: quantization_config"
MAX_RULES = 10_000  # targets, exceptions and rules in one config
MAX_PATTERN = 1000  # characters of one of them
INTEGERS: Mapping[int, NumberType] = {2: "int2", 3: "int3", 4: "int4", 5: "int5", 6: "int6", 8: "int8"}


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint stores its matrices. Each format has a class of its own, with the fields that its reader needs.

    notes: one sentence for each thing that is not computed as the config asks. has_fp8_cache: whether the config asks
    for a KV cache in fp8.
    """

    notes: tuple[str, ...] = ()
    has_fp8_cache: bool = False

    @property
    def storage(self) -> str:
        """Return the name of the format of most matrices, for plans; empty if they are not quantized."""
        return "fp8"


@dataclass(frozen=True, slots=True)
class Floats(Quantization):
    """Matrices of floats, as ModelOpt writes them with `quant_algo: null`. The KV cache may have scales."""

    @property
    def storage(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Awq(Quantization):
    """AWQ in the layout "gemm": 4 bits with zero points. group: columns that share a scale; 0 for whole rows."""

    group: int = 128

    @property
    def storage(self) -> str:
        return Format("int4", self.group, offsets="zero_points").name


@dataclass(frozen=True, slots=True)
class GptqRule:
    """Changes for the modules whose whole name a regular expression matches from its beginning.

    pattern: the expression. skip: whether these modules are not quantized. bits, group, symmetric: None where the rule
    does not change them.
    """

    pattern: str
    skip: bool = False
    bits: int | None = None
    group: int | None = None
    symmetric: bool | None = None


@dataclass(frozen=True, slots=True)
class Gptq(Quantization):
    """GPTQ. group: columns that share a scale; 0 for whole rows.

    stored_less_one: whether zero points are stored minus one (v1). whole_words: whether the one was subtracted from
    whole words of packed zero points, with borrows between neighbors, as GPTQModel does. dynamic: rules for modules,
    of which the first that matches counts.
    """

    bits: int = 4
    group: int = 128
    symmetric: bool = True
    stored_less_one: bool = True
    whole_words: bool = False
    dynamic: tuple[GptqRule, ...] = ()

    @property
    def storage(self) -> str:
        return Format(INTEGERS[self.bits], self.group, offsets="none" if self.symmetric else "zero_points").name


Packing = Literal["packed", "bytes", "nvfp4", "mxfp4"]


@dataclass(frozen=True, slots=True)
class Group:
    """One of compressed-tensors' config groups.

    targets: names of modules, `re:` patterns or class names. format: the format of the matrices. packing: how codes are
    laid out. ordered: whether columns may be permuted (actorder "group"). static_input: whether inputs have one stored
    scale.
    """

    targets: tuple[str, ...]
    format: Format
    packing: Packing
    ordered: bool = False
    static_input: bool = False


@dataclass(frozen=True, slots=True)
class CompressedTensors(Quantization):
    """compressed-tensors. groups: none if only the KV cache is quantized. ignore: names, patterns or classes of modules
    that are not quantized.
    """

    groups: tuple[Group, ...] = ()
    ignore: tuple[str, ...] = ()

    @property
    def storage(self) -> str:
        return self.groups[0].format.name if self.groups else ""


@dataclass(frozen=True, slots=True)
class BnbInt8(Quantization):
    """bitsandbytes' LLM.int8(). activations: "outliers" for the threshold 6, "int8" for none."""

    activations: Activations = "outliers"

    @property
    def storage(self) -> str:
        return Format("int8", activations=self.activations).name


@dataclass(frozen=True, slots=True)
class BnbNf4(Quantization):
    """bitsandbytes' nf4, with scales that may be quantized themselves (double quantization)."""

    @property
    def storage(self) -> str:
        return Format("nf4", 64).name


@dataclass(frozen=True, slots=True)
class Fp8(Quantization):
    """Matrices in fp8 with a scale for the matrix or for each row. Names of the parts differ between tools.

    activations: how inputs are taken. bound: whether each module has a bound of its input, which is not applied.
    """

    activations: Activations = "fp8"
    static_input: bool = False
    bound: bool = False


@dataclass(frozen=True, slots=True)
class Fp8Blocks(Quantization):
    """Matrices in fp8 with a scale per block of rows and columns (DeepSeek-V3, arXiv:2412.19437, 3.3)."""

    blocks: tuple[int, int] = (128, 128)


@dataclass(frozen=True, slots=True)
class ModelOptNvfp4(Quantization):
    """Matrices in NVFP4 as NVIDIA ModelOpt stores them: both factors of a scale are multiplied."""

    @property
    def storage(self) -> str:
        return Format("fp4", 16).name


@dataclass(frozen=True, slots=True)
class Mxfp4(Quantization):
    """Stacks of experts in MXFP4 (GPT-OSS). All other matrices keep their type."""

    @property
    def storage(self) -> str:
        return "mxfp4"


@dataclass(frozen=True, slots=True)
class TorchAo(Quantization):
    """torchao. The metadata of the files says how each matrix is stored. storage_name: the format for plans."""

    storage_name: str = "int8"

    @property
    def storage(self) -> str:
        return self.storage_name


def group_size(c: Config, name: str = "group_size") -> int:
    """Return the columns that share a scale; 0 where the config says -1, which means whole rows."""
    size = c.get_int(name)
    if size != -1 and not 0 < size <= LARGEST_GROUP:
        raise c.error(name, f"is {size}; it must be -1 for whole rows, or from 1 to {LARGEST_GROUP}")
    return max(size, 0)


def get_texts(c: Config, name: str) -> tuple[str, ...]:
    """Return a list of texts, such as names of modules; an absent or null one is empty."""
    values: list[Any] = c.get_list(name, [], [])
    if not all(isinstance(v, str) for v in values):
        raise c.error(name, f"is {str(values)[:80]}; it must be a list of texts")
    check_rules(c, name, values)
    return tuple(values)


def check_rules(c: Config, name: str, rules: list[str]) -> None:
    """Raise ConfigError for more or longer rules than MAX_RULES and MAX_PATTERN allow."""
    if len(rules) > MAX_RULES:
        raise c.error(name, f"has {len(rules)} entries; at most {MAX_RULES} are read")
    if (longest := max(map(len, rules), default=0)) > MAX_PATTERN:
        raise c.error(name, f"has an entry of {longest} characters; at most {MAX_PATTERN} are read")
