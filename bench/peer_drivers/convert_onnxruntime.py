"""Convert a Hugging Face folder for onnxruntime-genai: convert_onnxruntime.py FOLDER OUT int4

It uses blocks of 32 and 8-bit activations, the closest of its formats to the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

THREADS = 2


def main() -> None:
    source, out, form = sys.argv[1:]
    with tempfile.TemporaryDirectory() as cache:
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        what = ["-m", source, "-o", out, "-p", form, "-e", "cpu", "-c", cache]
        subprocess.run([*builder, *what, "--extra_options", "int4_block_size=32", "int4_accuracy_level=4"], check=True)
    file = Path(out) / "genai_config.json"
    config = json.loads(file.read_text())
    config["model"]["decoder"]["session_options"] |= {"intra_op_num_threads": THREADS}
    file.write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    main()
