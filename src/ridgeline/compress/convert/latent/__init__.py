"""Convert attention with KV heads to latent attention (MLA; TransMLA, arXiv:2502.07864; MHA2MLA, arXiv:2502.14837)."""
