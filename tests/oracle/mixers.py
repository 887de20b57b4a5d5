"""Small mixers with one hidden size, for tests that stack them."""

from __future__ import annotations

from ridgeline.spec import (
    Attention,
    GatedLRU,
    LatentAttention,
    Mamba,
    Mamba2,
    RMSNorm,
    Rope,
    ShortConvolution,
    TaylorAttention,
)

NORM = RMSNorm(1e-5)
WIDTH, VOCAB = 32, 97
FULL = Attention(4, 1, 8, 8**-0.5, Rope(8))
LOCAL = Attention(4, 2, 8, 8**-0.5, Rope(8), window=20)
LATENT = LatentAttention(4, 12, 8, 4, 8, 12**-0.5, NORM, rope=Rope(4))
MAMBA = Mamba(inner_size=48, state_size=8, conv_size=4, dt_rank=3)
MAMBA2 = Mamba2(num_heads=4, head_dim=8, state_size=8, num_groups=2, conv_size=4, norm=NORM)
CONVOLUTION = ShortConvolution(WIDTH, 3)
UNIT = GatedLRU(channels=48, num_blocks=2, conv_size=4)
TAYLOR = TaylorAttention(num_heads=2, head_dim=8, feature_dim=4)
