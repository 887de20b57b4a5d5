"""Train latents whose matrix is tiny as if it were not: an optimizer's step does not depend on the size of a weight.

`ridgeline convert --to mla=...` writes DeepSeek configs, whose epsilon of latents is fixed, with matrices so small that
the norm of latents changes nothing. Rows times f, and the epsilon times f^2, give the same result of the norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ridgeline.spec import ModelSpec

LEAST = 2.0**8  # smallest factor that is worth it: others come from training


@dataclass(frozen=True, slots=True)
class Levels:
    """A model and the factors on the rows of its latents, by layer; they are powers of two, so that no bit changes."""

    spec: ModelSpec
    factors: Mapping[int, float]

    @classmethod
    def of(cls, spec: ModelSpec, weights: Mapping[str, torch.Tensor]) -> Levels:
        """Find the layers whose latents are far smaller than their rotated keys."""
        layers, factors = list(spec.layers), {}
        for i, layer in enumerate(layers):
            mixer = spec.latents(i)
            if mixer is None:
                continue
            rows = weights[f"layers.{i}.mixer.kv_a.weight"].float().square().mean(dim=1)
            latent, rotated = (float(part.mean()) for part in (rows[: mixer.kv_lora_rank], rows[mixer.kv_lora_rank :]))
            if latent <= 0 or rotated <= LEAST**2 * latent:
                continue
            factors[i] = 2.0 ** round(math.log2(rotated / latent) / 2)
            norm = replace(mixer.latent_norm, eps=mixer.latent_norm.eps * factors[i] ** 2)
            layers[i] = replace(layer, mixer=replace(mixer, latent_norm=norm))
        return cls(replace(spec, layers=tuple(layers)), factors)

    def raised(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights as they train."""
        return self._scaled(weights, 1)

    def lowered(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights as they are written."""
        return self._scaled(weights, -1)

    def _scaled(self, weights: Mapping[str, torch.Tensor], sign: int) -> dict[str, torch.Tensor]:
        found = dict(weights)
        for i, factor in self.factors.items():
            mixer = self.spec.latents(i)
            assert mixer is not None
            for name in (f"layers.{i}.mixer.kv_a.weight", f"layers.{i}.mixer.kv_a.bias"):
                if name in found:
                    found[name] = found[name].detach().clone()
                    found[name][: mixer.kv_lora_rank] *= factor**sign
        return found
