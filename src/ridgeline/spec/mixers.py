"""Name the unions of all token mixers and of all channel mixers: the parts that a layer is made of.

A token mixer answers the questions of `Mixer` (mixer.py), a channel mixer those of mlp.py.
"""

from __future__ import annotations

from ridgeline.spec.attention import Attention, SharedAttention
from ridgeline.spec.indexed import IndexedAttention
from ridgeline.spec.latent import LatentAttention
from ridgeline.spec.mlp import MLP, GatedMLP, MoE
from ridgeline.spec.paired import PairedMLP
from ridgeline.spec.recurrent import RecurrentMixer
from ridgeline.spec.shortcut import ShortcutMLP

TokenMixer = Attention | SharedAttention | LatentAttention | IndexedAttention | RecurrentMixer
ChannelMixer = MLP | GatedMLP | MoE | PairedMLP | ShortcutMLP
