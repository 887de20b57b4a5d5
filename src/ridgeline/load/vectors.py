"""Read how the hidden states of a model become vectors: the files that sentence-transformers writes into its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from ridgeline.errors import CheckpointError, ConfigError
from ridgeline.load.safetensors import TensorFiles
from ridgeline.spec.encoder import DenseLayer, Pool, Vectors
from ridgeline.spec.folders import MAX_CONFIG_BYTES, read_json, read_text

Floats = np.ndarray[Any, np.dtype[np.float64]]
MODULES, PROMPTS, LIMITS = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
POOLS: Final[Mapping[str, Pool]] = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}
SHORT_POOLS: Final[Mapping[str, Pool]] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
ACTIVATIONS: Final[Mapping[str, Literal["identity", "tanh"]]] = {"Identity": "identity", "Tanh": "tanh"}
MAX_SIZE = 1 << 20  # numbers of a vector: more than any model has
MAX_PROMPT = 1 << 16  # characters


def read_vectors(folder: Path, config: Mapping[str, Any], width: int) -> Vectors | None:
    """Return what the folder says about vectors; None if it says nothing. config: its config.json.

    width: hidden size of the model. Raises ConfigError for a module or a value that is not supported.
    """
    names = [name for name in (MODULES, PROMPTS, LIMITS) if (folder / name).exists()]
    dimensions, any_dimension = _dimensions(config)
    if not names and not dimensions and not any_dimension:
        return None
    pool: Pool | None = None
    dense: list[DenseLayer] = []
    normalize = False
    for name, path in _modules(folder) if MODULES in names else ():
        if normalize:
            raise ConfigError(f"{MODULES}: {name} comes after Normalize, which is not supported")
        if name == "Pooling":
            pool = _pool(folder / path, f"{path}/config.json", width)
        elif name == "Dense":
            dense.append(_dense(folder / path, path))
        normalize = name == "Normalize"
    size = width
    for layer in dense:
        if layer.size_in != size:
            raise ConfigError(f"{layer.folder}/config.json: in_features is {layer.size_in}, but its input has {size}")
        size = layer.size_out
    texts = read_json(folder / PROMPTS) if PROMPTS in names else {}
    most = read_json(folder / LIMITS) if LIMITS in names else {}
    if most.get("do_lower_case"):
        raise ConfigError(f"{LIMITS}: do_lower_case is true, which is not supported; let the tokenizer do it")
    return Vectors(
        pool, tuple(dense), normalize, _prompts(texts), _limit(most), dimensions, any_dimension, _similarity(texts)
    )


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return the kinds of the modules after the model, and their folders."""
    found = _read_list(folder / MODULES)
    modules = []
    for i, entry in enumerate(found):
        kind, path = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str):
            raise ConfigError(f"{MODULES}: entry {i} is {entry!r:.100}; it must have a type and a path")
        name = kind.rpartition(".")[2]
        if name not in ("Transformer", "Pooling", "Dense", "Normalize", "Dropout") or (name == "Transformer") != (
            i == 0
        ):
            raise ConfigError(
                f"{MODULES}: module {i} is {kind!r:.100}, which is not supported; Transformer comes first, then "
                "Pooling, Dense and Normalize"
            )
        if Path(path).is_absolute() or ".." in Path(path).parts or (path and i == 0):
            raise ConfigError(
                f"{MODULES}: the path of module {i} is {path!r:.100}; it must be a folder of its own inside"
            )
        modules.append((name, path))
    return [module for module in modules if module[0] not in ("Transformer", "Dropout")]


def _read_list(path: Path) -> list[Any]:
    """Return the list in a JSON file. Raises ConfigError for anything else."""
    try:
        found = json.loads(read_text(path, MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path.name} is unreadable: {e}") from None
    if not isinstance(found, list):
        raise ConfigError(f"{path.name} holds no JSON list")
    return found


def _pool(folder: Path, name: str, width: int) -> Pool:
    config = read_json(folder / "config.json")
    size = config.get("word_embedding_dimension", config.get("embedding_dimension", width))
    if size != width:
        raise ConfigError(f"{name}: word_embedding_dimension is {size!r:.40}, but the hidden size is {width}")
    if config.get("include_prompt", True) is not True:
        raise ConfigError(f"{name}: include_prompt is false, which is not supported: the mean takes all tokens")
    prefix = "pooling_mode_"
    on = [key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value is True]
    own = config.get("pooling_mode")
    found = [POOLS.get(key) for key in on] if own is None else [SHORT_POOLS.get(str(own))]
    if len(found) != 1 or found[0] is None:
        raise ConfigError(
            f"{name}: the pooling is {own or ' and '.join(on) or 'none'!s:.100}; supported is one of {', '.join(POOLS)}"
        )
    return found[0]


def _dense(folder: Path, path: str) -> DenseLayer:
    config, name = read_json(folder / "config.json"), f"{path}/config.json"
    size_in, size_out = _size(config, "in_features", name), _size(config, "out_features", name)
    function, bias = str(config.get("activation_function", "Tanh")).rpartition(".")[2], config.get("bias", True)
    if function not in ACTIVATIONS or type(bias) is not bool:
        raise ConfigError(
            f"{name}: activation_function is {function!r:.100} and bias {bias!r:.40}; supported are "
            f"{' and '.join(ACTIVATIONS)}, and true or false"
        )
    return DenseLayer(path, size_in, size_out, bias, ACTIVATIONS[function])


def _size(config: Mapping[str, Any], field: str, name: str) -> int:
    size = config.get(field)
    if type(size) is not int or not 0 < size <= MAX_SIZE:
        raise ConfigError(f"{name}: {field} is {size!r:.100}; it must be from 1 to {MAX_SIZE}")
    return size


def _prompts(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    found = config.get("prompts") or {}
    if not isinstance(found, dict) or not all(isinstance(v, str) and len(v) <= MAX_PROMPT for v in found.values()):
        raise ConfigError(f"{PROMPTS}: prompts is {found!r:.100}; it must map names to texts")
    return tuple(found.items())


def _similarity(config: Mapping[str, Any]) -> Literal["cosine", "dot"]:
    name = config.get("similarity_fn_name") or "cosine"
    if name not in ("cosine", "dot"):
        raise ConfigError(f"{PROMPTS}: similarity_fn_name is {name!r:.100}, which is not supported; use cosine or dot")
    return "dot" if name == "dot" else "cosine"


def _limit(config: Mapping[str, Any]) -> int | None:
    value = config.get("max_seq_length")
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(f"{LIMITS}: max_seq_length is {value!r:.100}; it must be at least 1, or null")
    return value


def _dimensions(config: Mapping[str, Any]) -> tuple[tuple[int, ...], bool]:
    """Return the lengths that config.json allows for shorter vectors, with vLLM's names, and whether any is allowed."""
    listed, flag = config.get("matryoshka_dimensions"), config.get("is_matryoshka")
    if listed is not None and not (isinstance(listed, list) and all(type(n) is int and n > 0 for n in listed)):
        raise ConfigError(f"config.json: matryoshka_dimensions is {listed!r:.100}; it must be a list of sizes")
    if flag not in (None, False, True):
        raise ConfigError(f"config.json: is_matryoshka is {flag!r:.100}; it must be true or false")
    return tuple(sorted(listed or ())), flag is True and not listed


def dense_weights(folder: Path, layer: DenseLayer) -> tuple[Floats, Floats | None]:
    """Return the matrix [out, in] and the bias [out] of a Dense module. Raises CheckpointError for wrong tensors."""
    files = TensorFiles(folder / layer.folder)
    shapes = {"linear.weight": (layer.size_out, layer.size_in), "linear.bias": (layer.size_out,)}
    if not layer.bias:
        del shapes["linear.bias"]
    if set(files) != set(shapes):
        raise CheckpointError(f"{layer.folder} has the tensors {sorted(files)!r:.200}; it needs {', '.join(shapes)}")
    out: dict[str, Floats] = {}
    for name, shape in shapes.items():
        tensor = files.read(name)
        if tensor.data.shape != shape:
            raise CheckpointError(f"{layer.folder}: {name} has shape {list(tensor.data.shape)}, not {list(shape)}")
        bits = tensor.data
        out[name] = ((bits.astype(np.uint32) << 16).view(np.float32) if tensor.dtype == "bfloat16" else bits).astype(
            np.float64
        )
    return out["linear.weight"], out.get("linear.bias")
