"""Train block diffusion models from the weights of autoregressive ones (arXiv:2503.09573)."""

from ridgeline.train.blocks.produce import BLOCK_LENGTHS, BlocksReport, train_blocks

__all__ = ["BLOCK_LENGTHS", "BlocksReport", "train_blocks"]
