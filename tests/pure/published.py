"""The published models that ship with the planner, in the form that tests use: name -> config, number of parameters.

They are what real config.json files look like, spellings, omissions and left-over keys included: no `rope_theta` in
Llama 2, no `partial_rotary_factor` in GLM-4, `rope_interleaved` in SmolLM2, `hidden_act` beside `hidden_activation` in
Gemma 2. The counts check that an architecture has every tensor it should.

A count is of unique trained parameters, a tied head counted once. The hub's figure for a model adds up the tensors in
its files, so it is another one where the files hold more than that; the "source" of such models says so. How much is
confirmed is said there too: "count seen" means that the exact number was found in public repositories as the hub's or a
loaded model's; "config seen" that a copy of the file was; "memory" that the fields come from general knowledge of the
file and only their consequence, the count, is confirmed. Every count also equals that of the model that transformers
5.23 builds from the config on the meta device, but for those whose source says otherwise.
"""

from __future__ import annotations

from typing import Any

from ridgeline.catalog.models import published

PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    name: (dict(entry["config"]), entry["params"]) for name, entry in published().items()
}
