"""Invented measurements of the lab's experiments on models and their quality."""

from __future__ import annotations

from lab_fakes import Faked

EXACT: tuple[str, ...] = ("types",)
TYPES = {"fp32": [4], "bf16": [2], "fp8": [1, -240, 240], "int8": [1, -128, 127], "int4": [0.5, -8, 7]}
METHODS = {
    "awq-int3": {"bits": 3.15, "rtn": [0.2, 0.01], "awq-int3": [0.1, 0.01]},
    "gptq-int3": {"bits": 3.15, "rtn": [0.2, 0.01], "gptq-int3": [0.06, 0.01]},
    "keep-int3": {"bits": 3.3, "rtn": [0.2, 0.01], "keep-int3": [0.18, 0.01]},
}
OUTLIERS = {
    "errors": {"absmax": [0.2, 0.3], "llm.int8": [0.04, 0.03], "16 bits": [0.0, 0.0]},
    "plain_errors": {"absmax": [0.01], "llm.int8": [0.01]},
    "seconds": {"absmax": 1.0, "llm.int8": 4.0, "16 bits": 2.0},
}
PRUNED = {"activation": [0.5, 0.05], "weights": [1.0, 0.05], "random 0": [1.0, 0.05], "random 1": [1.2, 0.05]}
PASSES = {"16": {"1": 7.0, "256": 0.1}, "128": {"1": 0.9, "256": 0.01}}
RIGHT = {"1": 0.05, "2": 0.5, "4": 0.8, "8": 1.0}
TIMES = {"32": [4.0], "8": [1.0], "1": [0.5]}
HEADS = {"32": 8192, "8": 2048, "1": 256}
WINDOWS = {
    "seconds": {"2048": {"windows": [1.0], "attention": [1.0]}, "8192": {"windows": [1.1], "attention": [3.9]}},
    "pages": {"2048": {"windows": 512, "attention": 2048}, "8192": {"windows": 512, "attention": 8192}},
    "recall": {"none": 0.5, "all": 0.1, "half": 0.4},
    "losses": {"all": [0.5, 0.01], "half": [0.1, 0.01]},
}
BYTES = {  # losses of small models, by seed
    "4 key heads": [1.5, 1.5], "2 key heads": [1.53, 1.52], "1 key head": [1.54, 1.53], "latents": [1.5, 1.5],
    "pairs of layers": [1.51, 1.51], "windows": [1.7, 1.7], "windows, 1 global": [1.55, 1.55],
}  # fmt: skip
UNTRAINED: dict[str, list[float]] = {name: [] for name in BYTES}
LAYERS = {"pages": [64, 32], "tokens": 100, "reads": 4, "layers": [[2, 1]], "heads": [[2, 1.1]]}
SHARES = {
    name: {"in_order": [0.7, 0.6], "has_aim": [aim, aim], "different": [0.9, 0.9]}
    for name, aim in {"free": 0.4, "clamped": 0.4, "guided": 0.9, "both": 0.9}.items()
}
HEAD = {"tokens": 1.5, "shares": [0.4, 0.1]}
STATES = dict.fromkeys(("attention", "S4D", "Mamba", "window", "BASED 2", "BASED 16"), 1)
RECALLS = {
    "attention": [1.0] * 3, "S4D": [0.25] * 3, "Mamba": [0.9, 0.8, 0.7],
    "window": [0.6] * 3, "BASED 2": [0.7] * 3, "BASED 16": [0.99, 0.98, 0.97],
}  # fmt: skip
FAKED: dict[str, Faked] = {
    "types": Faked(
        {"types": TYPES, "e4m3fnuz": 240, "e4m3_of_ieee": 240},
        {"types": TYPES}, {"types": TYPES | {"fp8": [1, -448, 448]}}, {25},
    ),
    "speculative": Faked(
        {"tokens": {"1": 1.6, "4": 2.3}, "check": 1.1, "formula": 2.3, "speed_ups": {"1": 2.3, "256": 1.1}},
        {"exact": [0.1, 3.9], "bug": [12.0, 30.0], "tokens": {"1": 1.61, "4": 2.25}, "check": [1.2, 2.4, 3.9]},
        {"exact": [0.1, 4.1], "bug": [12.0, 30.0], "tokens": {"1": 1.6, "4": 2.5}, "check": [1.2, 2.4, 3.9]},
        {31, 32},
    ),
    "rounding": Faked(
        {"bits": {"a": 3.15, "b": 3.25}, "order": ["matrix", "row", "group of 32"]},
        {"shared": {"matrix": [0.2, 0.01], "row": [0.1, 0.01], "group of 32": [0.05, 0.01]}, "methods": METHODS},
        {"shared": {"matrix": [0.2, 0.01], "row": [0.06, 0.01], "group of 32": [0.05, 0.01]},
         "methods": METHODS | {"awq-int3": {"bits": 3.15, "rtn": [0.2, 0.02], "awq-int3": [0.19, 0.02]}}},
        {27, 29},
    ),
    "outliers": Faked(
        {"gain": 30.0}, OUTLIERS, OUTLIERS | {"errors": {"absmax": [0.2], "llm.int8": [0.1], "16 bits": [0.0]}}, {28}
    ),
    "prune": Faked(
        {}, {"losses": {"mlp=0.5": PRUNED}}, {"losses": {"mlp=0.5": PRUNED | {"random 0": [0.6, 0.05]}}}, {30}
    ),
    "diffusion": Faked(
        {"right_in_one": 0.05}, {"gains": PASSES, "here": {"1": [3.0, 1.5, 2.0], "16": [0.9]}, "right": RIGHT},
        {"gains": PASSES, "here": {"1": [3.0, 0.9, 2.0], "16": [0.9]}, "right": RIGHT}, {23},
    ),
    "heads": Faked(
        {"smaller": {"32": 1, "8": 4, "1": 32}},
        {"context": 4096, "seconds": TIMES, "pages": HEADS, "losses": {"1": [1.5, 0.1]}, "trained": BYTES},
        {"context": 4096, "seconds": TIMES, "pages": HEADS, "losses": {},
         "trained": BYTES | {"1 key head": [1.54, 1.56]}},
        {13},
    ),
    "windows": Faked(
        {}, WINDOWS | {"trained": BYTES}, WINDOWS | {"trained": BYTES | {"windows, 1 global": [1.8, 1.6]}}, {16}
    ),
    "repair": Faked(
        {"faster": 1.3},
        {"tokens": 100, "original": 9.0, "scratch": {"perplexity": [[4000, 2000]]},
         "repaired": {"perplexity": [[50, 20]], "kl": [[2, 1]]}},
        {"tokens": 100, "original": 9.0, "scratch": {"perplexity": [[4000, 3900]]},
         "repaired": {"perplexity": [[5000, 3000]], "kl": [[2, 1]]}},
        {44, 45},
    ),
    "layers": Faked(
        {"state": 0.5},
        LAYERS | {"trained": BYTES}, LAYERS | {"trained": BYTES | {"pairs of layers": [1.51, 1.53]}}, {15},
    ),
    "embeddings": Faked(
        {"in_order": 0.001, "has_aim": 0.36}, {"shares": SHARES},
        {"shares": SHARES | {"both": {"in_order": [0.7, 0.4], "has_aim": [0.9, 0.9], "different": [0.9, 0.9]}}}, {24},
    ),
    "drafts": Faked(
        {}, {"medusa": [HEAD], "eagle": [HEAD], "draft": [{"tokens": 1.1, "shares": [0.1, 0.0]}]},
        {"medusa": [{"tokens": 1.3, "shares": [0.3, 0.0]}], "eagle": [HEAD], "draft": [{"tokens": 1.6}]}, {33, 34},
    ),
    "recall": Faked(
        {"state": STATES, "values": 0.25},
        {"recall": RECALLS, "first": [1.0, 0.95], "error": 1e-6},
        {"recall": RECALLS | {"Mamba": [0.9, 0.9, 0.4], "BASED 2": [0.9] * 3}, "first": [1.0, 0.8],
         "error": 1e-6}, {17, 18, 20},
    ),
}  # fmt: skip
