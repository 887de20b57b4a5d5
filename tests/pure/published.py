"""The published models of the planner's catalog, in the form that tests use: name -> config, number of parameters.

The configs have the spellings, omissions and leftover keys of real config.json files: no `rope_theta` in Llama 2, no
`partial_rotary_factor` in GLM-4, `rope_interleaved` in SmolLM2, `hidden_act` beside `hidden_activation` in Gemma 2. The
counts check that an architecture has every tensor.

A count is the number of trained parameters, with a tied head counted once. The hub's figure adds up the tensors in a
model's files, so it differs if the files contain more; the "source" of such models says so. The source also says how
far a count is confirmed: "count seen" means that the exact number was found in public repositories, as the hub's or a
loaded model's; "config seen" that a copy of the file was found; "memory" that the fields come from general knowledge of
the file and only the resulting count is confirmed. Every count also equals that of the model that transformers 5.23
builds from the config on the meta device, unless the source says otherwise.
"""

from __future__ import annotations

from typing import Any

from ridgeline.catalog.models import published

PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    name: (dict(entry["config"]), entry["params"]) for name, entry in published().items()
}
