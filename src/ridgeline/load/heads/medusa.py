"""Medusa heads with the keys of FasterDecoding/Medusa, and with those of vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ridgeline.archs.config import HARMLESS, Config
from ridgeline.errors import CheckpointError, RequestError
from ridgeline.load.heads.head import HeadFile
from ridgeline.load.heads.tensors import ids_tensor, named, read_ids, read_weights
from ridgeline.load.safetensors import HostTensor, TensorFiles
from ridgeline.spec.heads import MedusaSpec

MOST_HEADS = 64  # so that a typing error does not fill the memory
PREFIX = "medusa_heads."  # some of vLLM's files have it


class MedusaOriginal:
    """Keys HEAD.BLOCK.linear.weight and HEAD.BLOCKS.weight; config.json does not say any size."""

    name, file = "medusa", "medusa_lm_head.safetensors"

    def matches(self, config: Mapping[str, Any], keys: frozenset[str]) -> bool:
        return any(re.fullmatch(r"0\.\d+\.(linear\.)?weight", key) for key in keys)

    def read(self, config: Mapping[str, Any], files: TensorFiles) -> HeadFile:
        c = Config(config)
        heads, blocks = _count(c, "medusa_num_heads", 1), _count(c, "medusa_num_layers", 0)
        target, layers = c.get_str("base_model_name_or_path", None, None), c.get_size("target_layer_count", None)
        c.finish(HARMLESS | {"version"})
        key = f"0.{blocks}.weight"
        if key not in files or len(files.info(key).shape) != 2:
            raise CheckpointError(f"the medusa head lacks the matrix {key}, which medusa_num_layers {blocks} requires")
        vocab, width = files.info(key).shape
        spec = MedusaSpec(
            hidden_size=width, vocab_size=vocab, draft_vocab_size=vocab, num_heads=heads, num_blocks=blocks,
            target_layers=layers,
        )  # fmt: skip
        return HeadFile(spec, read_weights(spec, _original(spec), files), format=self.name, target=target)

    def write(self, head: HeadFile) -> tuple[dict[str, Any], dict[str, HostTensor]]:
        spec = _medusa(head, self.name)
        for name, is_there in (
            ("a reduced vocabulary", spec.has_table), ("one output matrix for all heads", spec.shared_head),
            ("blocks without biases", not spec.bias and spec.num_blocks > 0),
        ):  # fmt: skip
            if is_there:
                raise RequestError(f"the format {self.name} holds no head with {name}; take vllm-medusa")
        config: dict[str, Any] = {
            "model_type": "medusa", "medusa_num_heads": spec.num_heads, "medusa_num_layers": spec.num_blocks,
            "base_model_name_or_path": head.target,
        }  # fmt: skip
        return {**config, **_layers(spec)}, named(spec, head.weights, _original(spec))


class MedusaVllm:
    """Keys blocks.HEAD.layers.BLOCK.weight and lm_heads.HEAD.weight, and a table of tokens as `token_map`."""

    name, file = "vllm-medusa", "model.safetensors"

    def matches(self, config: Mapping[str, Any], keys: frozenset[str]) -> bool:
        return any(key.removeprefix(PREFIX).startswith("blocks.0.layers.") for key in keys)

    def read(self, config: Mapping[str, Any], files: TensorFiles) -> HeadFile:
        c = Config(config)
        c.expect("model_type", "medusa")
        c.expect("logit_scale", 1.0, 1)
        vocab = c.get_size("vocab_size")
        spec = MedusaSpec(
            hidden_size=c.get_size("hidden_size"), vocab_size=vocab,
            draft_vocab_size=c.get_size("truncated_vocab_size", vocab, vocab),
            num_heads=_count(c, "num_heads", 1), num_blocks=_count(c, "num_hidden_layers", 1),
            bias=c.get_bool("medusa_fc_bias", False), shared_head=c.get_bool("original_lm_head", False),
            target_layers=c.get_size("target_layer_count", None),
        )  # fmt: skip
        c.finish(HARMLESS | {"max_paths", "topk", "max_seq_len"})
        prefix = PREFIX if any(key.startswith(PREFIX) for key in files) else ""
        table = f"{prefix}token_map"
        is_alone = spec.shared_head and f"{prefix}lm_head.weight" in files
        weights = read_weights(
            spec, _vllm(spec, alone=is_alone), files, prefix=prefix, extra=("token_map",) if spec.has_table else (),
            longer={w.name: vocab for w in spec.weights() if w.name.startswith("heads.")},
        )  # fmt: skip
        if not spec.has_table:
            return HeadFile(spec, weights, format=self.name)
        if table not in files:
            raise CheckpointError(
                f"the medusa head lacks token_map, which truncated_vocab_size {spec.draft_vocab_size} requires"
            )
        head = HeadFile(spec, weights, read_ids(table, files), self.name)
        assert head.vocabulary is not None
        cut = {
            name: HostTensor(np.ascontiguousarray(w.data[head.vocabulary]), w.dtype)
            for name, w in weights.items() if name.startswith("heads.") and len(w.data) == vocab
        }  # fmt: skip
        return HeadFile(spec, {**weights, **cut}, head.vocabulary, self.name)

    def write(self, head: HeadFile) -> tuple[dict[str, Any], dict[str, HostTensor]]:
        spec = _medusa(head, self.name)
        if spec.num_blocks == 0:
            raise RequestError(f"the format {self.name} holds no head without blocks; take medusa")
        config: dict[str, Any] = {
            "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": spec.hidden_size,
            "vocab_size": spec.vocab_size, "truncated_vocab_size": spec.draft_vocab_size,
            "num_heads": spec.num_heads, "num_hidden_layers": spec.num_blocks, "medusa_fc_bias": spec.bias,
            "original_lm_head": spec.shared_head,
        }  # fmt: skip
        tensors = named(spec, head.weights, _vllm(spec, alone=spec.shared_head))
        if head.vocabulary is not None:
            tensors["token_map"] = ids_tensor(head.vocabulary)
        return {**config, **_layers(spec)}, tensors


def _count(c: Config, name: str, least: int) -> int:
    count = c.get_int(name)
    if not least <= count <= MOST_HEADS:
        raise c.error(name, f"is {count}; it must be from {least} to {MOST_HEADS}")
    return count


def _layers(spec: MedusaSpec) -> dict[str, int]:
    return {} if spec.target_layers is None else {"target_layer_count": spec.target_layers}


def _medusa(head: HeadFile, name: str) -> MedusaSpec:
    if not isinstance(head.spec, MedusaSpec):
        raise RequestError(f"the format {name} holds Medusa heads, and this one is {head.spec.kind}")
    return head.spec


def _original(spec: MedusaSpec) -> dict[str, str]:
    blocks = {f"blocks.{h}.{b}": f"{h}.{b}.linear" for h in range(spec.num_heads) for b in range(spec.num_blocks)}
    return {**blocks, **{f"heads.{h}": f"{h}.{spec.num_blocks}" for h in range(spec.num_heads)}}


def _vllm(spec: MedusaSpec, *, alone: bool) -> dict[str, str]:
    """Return the names. alone: the output matrix that all heads share has the name of a single one."""
    blocks = {
        f"blocks.{h}.{b}": f"blocks.{h}.layers.{b}" for h in range(spec.num_heads) for b in range(spec.num_blocks)
    }
    heads = {f"heads.{h}": f"lm_heads.{h}" for h in range(spec.num_heads)}
    return {**blocks, **heads, **({"heads.0": "lm_head"} if alone else {})}
