"""List the recurrent mixers: their state is one array per sequence, as large after a million tokens as after one."""

from __future__ import annotations

from ridgeline.spec.convolution import GatedConvolution, ShortConvolution
from ridgeline.spec.delta import DeltaMixer
from ridgeline.spec.lightning import LightningAttention
from ridgeline.spec.lru import GatedLRU
from ridgeline.spec.mamba import Mamba, Mamba2
from ridgeline.spec.s4 import S4, S4D
from ridgeline.spec.taylor import TaylorAttention

RecurrentMixer = (
    Mamba | Mamba2 | ShortConvolution | GatedConvolution | TaylorAttention | LightningAttention | S4 | S4D | DeltaMixer
    | GatedLRU
)  # fmt: skip
