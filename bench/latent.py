"""Compare the two forms of latent attention, by chunk and context: python bench/latent.py [--heads 16]

Prints median milliseconds for the attention of one layer of DeepSeek-V2-Lite over pages of 16 tokens in float32, the
form that the engine chooses by counting operations, and the form that is faster. The gate: both forms agree to 1e-4.
"""

from __future__ import annotations

import argparse
from unittest.mock import patch

import numpy as np
import torch
from common import emit, median_seconds

from ridgeline.ops import api, open_table
from ridgeline.ops.api import PagedRows
from ridgeline.runtime.layout import Slices, build_layout
from ridgeline.spec import ALL, LatentAttention, RMSNorm

PAGE = 16
ROUNDS = 5
CONTEXTS = (512, 4096)
CHUNKS = (1, 16, 64, 128, 256, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=16)
    case = LatentAttention(parser.parse_args().heads, 512, 128, 64, 128, 192**-0.5, RMSNorm())
    table = open_table("reference")
    attend = table.primitive(api.PAGED_LATENT_ATTENTION, case)
    torch.manual_seed(0)
    kv_b = torch.randn(case.num_heads, 256, 512) * 512**-0.5
    for context in CONTEXTS:
        pages = torch.randn(1 + context // PAGE, PAGE, 1, case.row)
        tables = np.arange(1, 1 + context // PAGE)[None]
        for tokens in CHUNKS:
            q = torch.randn(tokens, case.num_heads, case.qk_head_dim)
            slices = Slices.plain(np.array([0]), np.array([context - tokens]), np.array([tokens]))
            state = PagedRows((pages,), build_layout(slices, tables, PAGE, ALL, table.memory))
            out, took = {}, {}
            for form, absorbs in (("absorbed", True), ("rebuilt", False)):
                with patch.object(LatentAttention, "absorbs", lambda *_, absorbs=absorbs: absorbs):
                    out[form] = attend(q, state, kv_b)
                    took[form] = median_seconds(lambda q=q, state=state: attend(q, state, kv_b), ROUNDS)
            counted = case.absorbed_work(tokens, context) / case.rebuilt_work(tokens, context)
            emit(
                f"latent attention: {tokens} tokens of {context}",
                bool(torch.allclose(out["absorbed"], out["rebuilt"], rtol=0, atol=1e-4)),
                absorbed_ms=round(took["absorbed"] * 1e3, 2), rebuilt_ms=round(took["rebuilt"] * 1e3, 2),
                counted_ratio=round(counted, 3), measured_ratio=round(took["absorbed"] / took["rebuilt"], 3),
                taken="absorbed" if case.absorbs(tokens, context) else "rebuilt",
                faster=min(took, key=took.__getitem__),
            )  # fmt: skip


if __name__ == "__main__":
    main()
