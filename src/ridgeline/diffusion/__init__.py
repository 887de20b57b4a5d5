"""Fill the answers of diffusion language models: which positions get a token in a pass, and which token."""

from ridgeline.diffusion.canvas import CanvasDenoiser, Softens
from ridgeline.diffusion.denoiser import Denoiser
from ridgeline.diffusion.limits import check_params
from ridgeline.diffusion.notes import block_notes, edit_notes, length_notes
from ridgeline.diffusion.start import as_blocks

__all__ = [
    "CanvasDenoiser",
    "Denoiser",
    "Softens",
    "as_blocks",
    "block_notes",
    "check_params",
    "edit_notes",
    "length_notes",
]
