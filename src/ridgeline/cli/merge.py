"""`ridgeline merge`: put an adapter into a model's weights."""

from __future__ import annotations

from typing import Annotated

import typer

from ridgeline.cli.flags import changes as c
from ridgeline.cli.flags import options as o
from ridgeline.cli.show.steps import step_bar

_Model = Annotated[
    str, typer.Argument(help="The model: a folder or a Hugging Face hub id. Its weights must be floats.")
]
_Adapter = Annotated[
    str, typer.Argument(help="The adapter that peft wrote (LoRA, rsLoRA or DoRA): a folder or a Hugging Face hub id.")
]


def merge(model: _Model, adapter: _Adapter, out: c.Out, json_output: o.JsonReport = False) -> None:
    """Put an adapter into a model's weights, write the result as a checkpoint, and read it back."""
    from ridgeline.compress.merge import merge

    with step_bar() as on_progress:
        report = merge(model, adapter, out, on_progress)
    if json_output:
        import json
        from dataclasses import asdict

        print(json.dumps(asdict(report), indent=2))
        return
    from ridgeline.spec.text import num_bytes

    also = f", and {report.replaced} weights replaced" if report.replaced else ""
    print(
        f"wrote {out}: {num_bytes(report.num_bytes)}, with terms of rank {report.rank} at most in {report.matrices} "
        f"matrices{also}"
    )
