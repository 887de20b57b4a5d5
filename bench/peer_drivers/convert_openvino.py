"""Convert a Hugging Face folder to OpenVINO IR: convert_openvino.py FOLDER OUT int8|int4

Every matrix is quantized, including embedding and head: int8 with a scale for each row, int4 with one for each 32
numbers.
"""

from __future__ import annotations

import sys

from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig


def main() -> None:
    source, out, form = sys.argv[1:]
    how = {"int8": {"bits": 8}, "int4": {"bits": 4, "group_size": 32, "ratio": 1.0, "all_layers": True}}[form]
    config = OVWeightQuantizationConfig(sym=True, **how)
    model = OVModelForCausalLM.from_pretrained(source, export=True, compile=False, quantization_config=config)
    model.save_pretrained(out)


if __name__ == "__main__":
    main()
