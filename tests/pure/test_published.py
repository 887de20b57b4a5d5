"""Published models, from their config.json alone: parameter counts to the last one, and the JSON form."""

from __future__ import annotations

import json

import pytest
from published import PUBLISHED

from ridgeline.archs import FAMILIES, spec_from_config
from ridgeline.spec import from_json, to_json


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model(name: str) -> None:
    config, count = PUBLISHED[name]
    spec = spec_from_config(config)
    assert spec.num_params() == count
    assert from_json(json.loads(json.dumps(to_json(spec)))) == spec


def test_every_family_has_a_published_model() -> None:
    assert {config["model_type"] for config, _ in PUBLISHED.values()} == set(FAMILIES)
