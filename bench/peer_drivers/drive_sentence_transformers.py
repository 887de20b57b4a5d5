"""Embed texts with sentence-transformers, in a process of its own: one JSON line in for each round, one out.

It runs in the environment of that library and imports nothing of Ridgeline.
"""

from __future__ import annotations

import base64
import json
import sys
import time

import torch
from sentence_transformers import SentenceTransformer


def main() -> None:
    """Read the model, the number of threads and the texts, then time one round for each further line."""
    start = json.loads(sys.stdin.readline())
    torch.set_num_threads(start["threads"])
    model = SentenceTransformer(start["model"], device="cpu")
    model.encode(start["texts"][:8], show_progress_bar=False)
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        rows = model.encode(start["texts"], show_progress_bar=False, batch_size=start["batch"])
        seconds = time.perf_counter() - begin
        data = base64.b64encode(rows.astype("<f4").tobytes()).decode("ascii")
        print(json.dumps({"seconds": seconds, "rows": data, "shape": rows.shape}), flush=True)


if __name__ == "__main__":
    main()
