"""The report of a quantized model: quality on held-out text, bits and bytes, the matrices that lost most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.compress.compare import INTERVAL, Comparison
from ridgeline.compress.inputs import MatrixKey
from ridgeline.compress.outliers import Outliers
from ridgeline.compress.speed import Speeds

WORST = 5  # matrices that the printed report names
FILE = "quantization_report.json"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of quantizing a model, with the loss.

    Attributes:
        num_bytes: bytes of all weights, by the name of the model: "as stored", "rtn", and the scheme.
        bits: bits of a number of a rounded matrix, scales and zero points included, by the same names.
        lost: share of the power of each matrix's output that became error.
        unseen: matrices that saw too few tokens, with the number of tokens. They are rounded to nearest.
        outliers: columns of inputs with outliers, by the name of the matrix.
        group: columns that share a scale; 0 where a row does.
        speeds: decode speeds by the same names, without "rtn", which has the matrices of the scheme; None if they were
            not measured.
    """

    scheme: str
    format: str
    model: str
    calibration: str
    comparison: Comparison | None
    num_bytes: Mapping[str, int]
    bits: Mapping[str, float]
    lost: Mapping[MatrixKey, float]
    unseen: Mapping[MatrixKey, int]
    outliers: Mapping[MatrixKey, Outliers]
    notes: tuple[str, ...] = ()
    group: int = 0
    speeds: Speeds | None = None

    def worst(self) -> list[tuple[MatrixKey, float]]:
        """Return the matrices that lost most, the worst first."""
        return sorted(self.lost.items(), key=lambda item: -item[1])[:WORST]

    def remarks(self) -> list[str]:
        """Return sentences about the result that users should read."""
        out = list(self.notes)
        comparison = self.comparison
        for name, gain in ({} if comparison is None else comparison.gains).items():
            if comparison is not None and not comparison.is_better(name):
                other = "rounding to nearest" if name == "rtn" else name
                out.append(
                    f"{self.scheme} is no better than {other}: its KL is {gain.value:.2g} lower, and the interval of "
                    f"this difference is ±{INTERVAL * (gain.standard_error or 0.0):.2g}"
                )
        if self.unseen:
            names = ", ".join(f"{key} ({tokens} tokens)" for key, tokens in list(self.unseen.items())[:WORST])
            more = f" and {len(self.unseen) - WORST} more" if len(self.unseen) > WORST else ""
            out.append(
                f"{len(self.unseen)} matrices saw fewer tokens than they have columns and are rounded to nearest: "
                f"{names}{more}"
            )
        return out

    def to_json(self) -> dict[str, Any]:
        """Return the whole report as plain values."""
        out: dict[str, Any] = {
            "scheme": self.scheme, "format": self.format, "model": self.model, "calibration": self.calibration,
            "bytes": dict(self.num_bytes), "bits": dict(self.bits), "remarks": self.remarks(),
            "output_power_lost": {str(key): value for key, value in self.lost.items()},
            "rounded_to_nearest": {str(key): tokens for key, tokens in self.unseen.items()},
            "outliers": {str(key): found.to_json() for key, found in self.outliers.items()},
        }  # fmt: skip
        if self.speeds is not None:
            out["speed"] = {name: speed.to_json() for name, speed in self.speeds.by_name.items()}
            out["speed_notes"] = list(self.speeds.notes)
        if self.comparison is not None:
            c = self.comparison
            out |= {
                "held_out_tokens": c.num_tokens, "as_stored": c.original.to_json(),
                "models": {name: quality.to_json() for name, quality in c.others.items()},
            }  # fmt: skip
            if (gain := c.gains.get("rtn")) is not None:
                out |= {"kl_gain_over_rtn": gain.value, "kl_gain_standard_error": gain.standard_error}
        return out
