"""Convert a Hugging Face folder to CTranslate2's format: convert_ctranslate2.py FOLDER OUT int8"""

from __future__ import annotations

import sys

from ctranslate2.converters import TransformersConverter


def main() -> None:
    source, out, form = sys.argv[1:]
    TransformersConverter(source, low_cpu_mem_usage=True).convert(out, quantization=form, force=True)


if __name__ == "__main__":
    main()
