"""Convert a trained model to a cheaper architecture, with the words of `ridgeline plan`."""

from ridgeline.compress.convert.options import ConvertOptions
from ridgeline.compress.convert.run import convert

__all__ = ["ConvertOptions", "convert"]
