"""Read the tensors of a head strictly: all names and shapes are checked before any number is read."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from ridgeline.errors import CheckpointError
from ridgeline.load.heads.head import Ids
from ridgeline.load.safetensors import HostTensor, TensorFiles
from ridgeline.spec import Weight
from ridgeline.spec.heads import HeadSpec

Modules = Mapping[str, str]  # our modules -> the checkpoint's
DERIVED = re.compile(r"rotary_emb\.inv_freq$")  # frequencies that old checkpoints store, which the config gives
FLOATS = ("F32", "F16", "BF16")
INTEGERS = ("I64", "I32")


def key_of(name: str, modules: Modules) -> str:
    """Return the checkpoint's name of one of our weights."""
    module, _, kind = name.rpartition(".")
    return f"{modules[module]}.{kind}"


def read_weights(
    spec: HeadSpec, modules: Modules, files: TensorFiles, *, prefix: str = "", extra: Collection[str] = (),
    longer: Mapping[str, int] | None = None,
) -> dict[str, HostTensor]:  # fmt: skip
    """Return all weights of a head by our names.

    Args:
        prefix: a beginning that the checkpoint's names may have.
        extra: names of tensors that the format reads in another way.
        longer: numbers of rows that an output matrix of the checkpoint may have instead, by our name.

    Raises:
        CheckpointError: for a tensor that is missing or unknown, and for one of a wrong shape or type.
    """
    given = _without_prefix(files, prefix)
    wanted = {key_of(w.name, modules): w for w in spec.weights()}
    if missing := [key for key in wanted if key not in given]:
        raise CheckpointError(
            f"the {spec.kind} head lacks {missing[0]}, which its config.json requires{_more(missing)}"
        )
    if unknown := [n for key, n in given.items() if key not in wanted and key not in extra and not DERIVED.search(n)]:
        raise CheckpointError(
            f"the {spec.kind} head has {unknown[0]}, which its config.json does not describe{_more(unknown)}; it is "
            "refused, because ignoring a tensor could make its drafts worse"
        )
    for key, weight in wanted.items():
        _check(given[key], weight, files, (longer or {}).get(weight.name))
    return {weight.name: files.read(given[key]) for key, weight in wanted.items()}


def read_ids(name: str, files: TensorFiles) -> Ids:
    """Return a tensor of whole numbers. Raises CheckpointError for another type or more than one axis."""
    info = files.info(name)
    if info.dtype not in INTEGERS or len(info.shape) != 1:
        raise CheckpointError(f"{name} has type {info.dtype} and {len(info.shape)} axes; it must be a list of integers")
    return np.array(files.array(name), np.int64)


def ids_tensor(values: Ids) -> HostTensor:
    return HostTensor(np.ascontiguousarray(values, np.int64), "int64")


def named(spec: HeadSpec, weights: Mapping[str, HostTensor], modules: Modules) -> dict[str, HostTensor]:
    """Return the tensors of a checkpoint, by its names: the inverse of `read_weights`."""
    return {key_of(w.name, modules): weights[w.name] for w in spec.weights()}


def common(kinds: Iterable[Any], what: str) -> Any:
    """Return the only one of some equal values. Raises CheckpointError if they differ."""
    found = set(kinds)
    if len(found) != 1:
        raise CheckpointError(f"the head's tensors have different {what}: {', '.join(map(str, sorted(found)))}")
    return found.pop()


def _without_prefix(files: TensorFiles, prefix: str) -> dict[str, str]:
    """Return the full name of each tensor by its name without the prefix."""
    found: dict[str, str] = {}
    for name in files:
        if (other := found.setdefault(name.removeprefix(prefix), name)) != name:
            raise CheckpointError(f"the head has both {other} and {name}, which are the same weight")
    return found


def _check(name: str, weight: Weight, files: TensorFiles, longer: int | None) -> None:
    info, wanted = files.info(name), [tuple(weight.shape)]
    if longer is not None:
        wanted.append((longer, *weight.shape[1:]))
    if tuple(info.shape) not in wanted:
        raise CheckpointError(f"{name} has shape {list(info.shape)}, but config.json requires {list(weight.shape)}")
    if info.dtype not in FLOATS:
        raise CheckpointError(f"{name} has type {info.dtype}; a head's weights are one of {', '.join(FLOATS)}")


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
