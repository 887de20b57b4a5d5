"""Choose the codes of quantized matrices with calibration data: AWQ, GPTQ, SmoothQuant, clipped ranges, mixed bits.

How codes are stored and multiplied belongs in `quant/` and `ops/`; file formats belong in `load/`.
"""

from ridgeline.compress.quantize import Options, quantize
from ridgeline.compress.report import Report
from ridgeline.compress.scheme import parse_scheme
from ridgeline.compress.write import WRITERS

__all__ = ["WRITERS", "Options", "Report", "parse_scheme", "quantize"]
