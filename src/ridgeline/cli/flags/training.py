"""The flags that all commands that train have."""

from __future__ import annotations

from typing import Annotated, Any

from ridgeline.cli.option import option


def run_option(*names: str, help: str, least: int | None = None) -> Any:
    """Return an option of the panel that says how to train."""
    return option(*names, help=help, min=least, panel="Run")


Dtype = Annotated[str, option("--dtype", help="Type of the saved weights: bfloat16 or float32. Default: bfloat16.")]
MicroTokens = Annotated[
    int | None,
    run_option(
        "--micro-tokens",
        least=1,
        help="Tokens per forward pass; lower it if memory runs out. Default: --batch-tokens, at most 8192.",
    ),
]
Clip = Annotated[float, run_option("--clip", help="Largest norm of a gradient; 0: no limit. Default: 1.")]
Precision = Annotated[
    str,
    run_option(
        "--precision",
        help="Type of the computation: bfloat16, float32, or auto (bfloat16 on a GPU, float32 on a CPU). "
        "Default: auto.",
    ),
]
ActivationCheckpointing = Annotated[
    bool,
    run_option("--activation-checkpointing", help="Compute activations again in the backward pass, to save memory."),
]
