"""Invented measurements of the lab's experiments on the engine, the scheduler and the kernels."""

from __future__ import annotations

from lab_fakes import Faked

EXACT: tuple[str, ...] = ("radix",)
BATCHES = (1, 2, 4, 8, 16, 32)
PLANS = {"jamba_factor": 8, "minimax_factor": 8, "minimax_params": 456e9}
FAKED: dict[str, Faked] = {
    "batch": Faked(
        {"step_s": {str(n): 0.02 for n in BATCHES}, "int8_gain": 4.0, "copies": 4},
        {"step_s": {str(n): [0.02 + n / 1000] * 3 for n in BATCHES}, "int8_s": [0.006] * 3,
         "rate_1": 100.0, "rate_4": 399.0, "ttft_1": 0.01, "ttft_4": 0.01},
        {"step_s": {str(n): [0.02 * n] * 3 for n in BATCHES}, "int8_s": [0.015] * 3,
         "rate_1": 100.0, "rate_4": 200.0, "ttft_1": 0.01, "ttft_4": 0.01}, {8, 9, 26},
    ),
    "chunks": Faked(
        {"steps": {"whole": 1, "chunks": 3}},
        {"whole": [[0.3], [0.31]], "chunks": [[0.03, 0.05, 0.02]] * 2, "alone": [0.001]},
        {"whole": [[0.3], [0.31]], "chunks": [[0.03, 0.05]] * 2, "alone": [0.001]}, {47},  # a step is missing
    ),
    "flash": Faked(
        {"tiles": {"2048": 1.0}, "materialized": {"2048": 33.0}},
        {"seconds": {"2048": [[0.1, 0.1, 0.11], [0.3, 0.31, 0.29]]}, "error": 1e-6},
        {"seconds": {"2048": [[0.1, 0.1, 0.3], [0.3, 0.31, 0.29]]}, "error": 1e-6}, {39},  # one repetition is no gain
    ),
    "lengths": Faked(
        {"reads": {name: {"256": 1.0, "4096": 2.0} for name in ("attention", "mamba2")}},
        {"seconds": {"attention": {"256": [0.01] * 3, "4096": [0.02] * 3},
                     "mamba2": {"256": [0.012] * 3, "4096": [0.012] * 3}}, "trained": {}},
        {"seconds": {name: {"256": [0.01] * 3, "4096": [0.02] * 3} for name in ("attention", "mamba2")},
         "trained": {}}, {22},
    ),
    "naive": Faked(
        {"naive_exponent": 2.98, "cached_exponent": 1.99, "flops_exponent": 1.1},
        {"seconds": {}, "naive_exponent": 1.2, "cached_exponent": 0.1},
        {"seconds": {}, "naive_exponent": 0.5, "cached_exponent": 0.4}, {6},
    ),
    "paging": Faked(
        {"pages": 32, "pages_apart": 144},
        {"paged": {"500": 0.015, "30": 0.2}, "reserved": {"500": 0.88}, "buddy": {"500": 0.3}, "pages": 32},
        {"paged": {"500": 0.05, "30": 0.2}, "reserved": {"500": 0.88}, "buddy": {"500": 0.3}, "pages": 144}, {37, 38},
    ),
    "phases": Faked(
        {"prefill_by": {"compute": 2.0, "weights": 1.0}, "decode_by": {"compute": 1.0, "weights": 2.0},
         "flops_per_s": 2e11, "bytes_per_s": 3e10, "params": 135e6},
        {"ttft_s": {"1": [0.5] * 3, "8": [3.0] * 3}, "tpot_s": {"1": [0.025] * 3, "8": [0.04] * 3},
         "wall_s": [1.0] * 3, "sum_s": [0.99] * 3, "sum_of_n_s": [1.02] * 3},
        {"ttft_s": {"1": [2.0] * 3, "8": [2.5] * 3}, "tpot_s": {"1": [0.02] * 3, "8": [0.2] * 3},
         "wall_s": [1.0] * 3, "sum_s": [0.7] * 3, "sum_of_n_s": [0.8] * 3}, {5, 11, 12},
    ),
    "plans": Faked(
        PLANS, {**PLANS, "token_s": {"1": 0.03, "8": 0.004}},
        {"jamba_factor": 4, "minimax_factor": 4, "minimax_params": 456e9, "token_s": {"1": 0.03, "8": 0.004}}, {19, 21},
    ),
    "radix": Faked(
        {"optimum": {"0.0625": 0.5, "0.5": 0.8, "1.0": 0.8}},
        {"rates": {"0.0625": 0.2, "0.5": 0.73, "1.0": 0.79}, "requests": 10},
        {"rates": {"0.0625": 0.2, "0.5": 0.71, "1.0": 0.79}, "requests": 10}, {46},
    ),
    "recorded": Faked(
        {}, {"recorded_s": [0.001] * 3, "apart_s": [0.002] * 3},
        {"recorded_s": [0.001] * 3, "apart_s": [0.0011] * 3}, {40},
    ),
    "selective": Faked(
        {"padded_share": 0.5, "steps_apart": 192}, {"equal": True, "gains": [3.0, 3.1, 2.9]},
        {"equal": False, "gains": [3.0, 3.1, 2.9]}, {36},
    ),
}  # fmt: skip
