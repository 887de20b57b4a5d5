"""Write the table of the page's sampling form from the declarations of the parameters (spec/request.py)."""

from __future__ import annotations

import json
from typing import Any

from ridgeline.spec.parameters import Declared, Number, Whole
from ridgeline.spec.request import SAMPLING

NAME = "declared.js"


def form_script() -> str:
    """Return a module that exports PARAMETERS: name, label, attributes of the input, and help of each field."""
    rows = [_row(one) for one in SAMPLING if one.parameter.label]
    return f"// Made from the declarations in spec/request.py.\nexport const PARAMETERS = {json.dumps(rows)};\n"


def _row(one: Declared) -> list[Any]:
    parameter = one.parameter
    assert isinstance(parameter, Whole | Number), f"{one.name}: the form has fields for numbers alone"
    bounds = parameter.schema()
    low = bounds.get("minimum", bounds.get("exclusiveMinimum"))
    limits = {"min": low, "max": bounds.get("maximum"), "step": parameter.step, "value": parameter.start}
    return [one.name, parameter.label, {k: v for k, v in limits.items() if v is not None}, parameter.help]
