"""Convert a Hugging Face folder to a GGUF file of 16 bits with llama.cpp's own script: ... FOLDER FILE

The script and its package gguf, which is newer than the published one, are in the source release that the environment
has unpacked. It knows tokenizers by their hashes. Ours is invented and nothing uses it, so any known one will do.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    source, file = sys.argv[1:]
    tools = next((Path(sys.prefix) / "source").glob("*/vendor/llama.cpp"))
    sys.path[:0] = [str(tools), str(tools / "gguf-py")]
    import convert_hf_to_gguf  # type: ignore[import-not-found]
    from conversion.base import TextModel  # type: ignore[import-not-found]

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", source, "--outfile", file, "--outtype", "bf16"]
    if "qwen3_next" in (Path(source) / "config.json").read_text():
        sys.argv.append("--no-mtp")  # there are no layers for multi-token prediction
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
