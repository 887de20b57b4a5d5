"""Read peft's adapter_config.json: each field that changes the result is served, or refused by its name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.errors import CheckpointError
from ridgeline.spec.folders import read_json

CONFIG = "adapter_config.json"
MAX_RANK = 512  # largest rank that is read at all; a server has its own, lower limit
# Fields that say how the adapter was trained, or which modules have tensors, which the tensors themselves say too.
_HARMLESS = frozenset(
    "auto_mapping base_model_name_or_path exclude_modules fan_in_fan_out inference_mode layers_pattern "
    "layers_to_transform lora_dropout megatron_core peft_version qalora_group_size revision runtime_config "
    "target_modules task_type eva_config modules_to_save".split()
)
# Ways to draw the first numbers of an adapter that leave the model's own weights as they are.
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
_PATTERN = re.compile(r"\^?[\w.-]{1,500}")
_BIASES = ("none", "all", "lora_only")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields of adapter_config.json that decide the result.

    rank, alpha: the rank and alpha of modules that no pattern names. ranks, alphas: the patterns, which name modules by
    the ends of their names, or whole names after a ^. rooted: whether the scale is alpha / sqrt(rank) (rsLoRA) instead
    of alpha / rank. dora: whether matrices have magnitudes. fields: the whole file.
    """

    rank: int
    alpha: float
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]
    rooted: bool
    dora: bool
    fields: Mapping[str, Any]

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's term."""
        return int(_of(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's term."""
        rank, alpha = self.rank_of(module), float(_of(self.alphas, module, self.alpha))
        return alpha / math.sqrt(rank) if self.rooted else alpha / rank


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read the config of an adapter's folder. Raises CheckpointError, which names the field."""
    fields = read_json(folder / CONFIG)

    def wrong(name: str, why: str) -> CheckpointError:
        return CheckpointError(f"{folder.name}/{CONFIG}: {name} is {fields.get(name)!r:.100}; {why}")

    if fields.get("peft_type") != "LORA":
        raise wrong("peft_type", "only LORA is served (with use_rslora or use_dora)")
    if fields.get("init_lora_weights", True) not in _PLAIN_STARTS:
        why = "it changes the model's own weights too; let peft convert the adapter to LoRA"
        raise wrong("init_lora_weights", why)
    if fields.get("bias", "none") not in _BIASES:
        raise wrong("bias", f"it must be one of {', '.join(_BIASES)}")
    for name in ("use_rslora", "use_dora", "lora_bias"):
        if not isinstance(fields.get(name, False), bool):
            raise wrong(name, "it must be true or false")
    rank, alpha = fields.get("r", 8), fields.get("lora_alpha", 8)
    if not _is_rank(rank):
        raise wrong("r", f"it must be a whole number from 1 to {MAX_RANK}")
    if not _is_number(alpha):
        raise wrong("lora_alpha", "it must be a finite number")
    patterns = [fields.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    rules = ("rank_pattern", patterns[0], _is_rank), ("alpha_pattern", patterns[1], _is_number)
    for name, pattern, is_right in rules:
        if not isinstance(pattern, dict) or not all(map(is_right, pattern.values())):
            raise wrong(name, "it must be an object of numbers")
        if any(not _PATTERN.fullmatch(key) for key in pattern):
            raise wrong(name, "its keys must be names of modules or ends of them, without other regular expressions")
    served = {
        "peft_type", "init_lora_weights", "bias", "use_rslora", "use_dora", "lora_bias", "r", "lora_alpha",
        "rank_pattern", "alpha_pattern",
    }  # fmt: skip
    for name, value in fields.items():
        if name not in served and name not in _HARMLESS and value not in (None, False, [], {}, ""):
            raise wrong(name, "it changes the result and is not served; let peft merge this adapter")
    rooted, dora = fields.get("use_rslora", False), fields.get("use_dora", False)
    return AdapterConfig(rank, alpha, patterns[0], patterns[1], rooted, dora, fields)


def _of(pattern: Mapping[str, Any], module: str, default: float) -> float:
    """Return the number of the first key that names a module."""
    for key, value in pattern.items():
        name = key.removeprefix("^")
        if module == name or (name == key and module.endswith(f".{name}")):
            return float(value)
    return default


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
