"""Choose the codes of quantized matrices with calibration data: AWQ, GPTQ, SmoothQuant, clipped ranges, mixed bits.

How codes are stored and multiplied belongs in `quant/` and `ops/`; file formats belong in `load/`.
"""
