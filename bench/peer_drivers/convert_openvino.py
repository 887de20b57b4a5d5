"""Convert a Hugging Face folder to OpenVINO IR: convert_openvino.py FOLDER OUT float32|int8|int4

For int8 and int4 every matrix is quantized, including embedding and head: int8 with a scale for each row, int4 with one
for each 32 numbers. float32 also converts the tokenizer, with which openvino-genai compares a model and its draft.
"""

from __future__ import annotations

import sys

import openvino
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
from transformers import AutoTokenizer


def main() -> None:
    source, out, form = sys.argv[1:]
    if form == "float32":
        model = OVModelForCausalLM.from_pretrained(source, export=True, compile=False, load_in_8bit=False)
        model.save_pretrained(out)
        parts = convert_tokenizer(AutoTokenizer.from_pretrained(source), with_detokenizer=True)
        for name, part in zip(("tokenizer", "detokenizer"), parts, strict=True):
            openvino.save_model(part, f"{out}/openvino_{name}.xml")
        return
    how = {"int8": {"bits": 8}, "int4": {"bits": 4, "group_size": 32, "ratio": 1.0, "all_layers": True}}[form]
    config = OVWeightQuantizationConfig(sym=True, **how)
    model = OVModelForCausalLM.from_pretrained(source, export=True, compile=False, quantization_config=config)
    model.save_pretrained(out)


if __name__ == "__main__":
    main()
