"""All cases of the oracle, by name.

`python -m oracle.families`, with tests/ on the path, prints a table of the oracle's measurements.
"""

from __future__ import annotations

from oracle import (
    cases_delta,
    cases_dense,
    cases_experts,
    cases_falcon,
    cases_gemma,
    cases_hybrid,
    cases_kin,
    cases_late,
    cases_latest,
    cases_layer_norm,
    cases_linear,
    cases_more,
    cases_parts,
    cases_recurrent,
    cases_windows,
)
from oracle.case import Case

CASES: dict[str, Case] = (
    cases_dense.CASES
    | cases_more.CASES
    | cases_kin.CASES
    | cases_falcon.CASES
    | cases_windows.CASES
    | cases_parts.CASES
    | cases_gemma.CASES
    | cases_layer_norm.CASES
    | cases_experts.CASES
    | cases_recurrent.CASES
    | cases_linear.CASES
    | cases_delta.CASES
    | cases_hybrid.CASES
    | cases_latest.CASES
    | cases_late.CASES
)


if __name__ == "__main__":
    from oracle.build import print_table

    print_table(CASES)
