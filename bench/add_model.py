"""Add a published model to the catalog, and check its parameter count.

    python bench/add_model.py NAME --config config.json --published 14.7B --source TEXT [--alias NAME ...]
    python bench/add_model.py --check [NAME ...]     # checks the entries that are there; default: all with a count

NAME is the hub id. --published is the count that its authors or others state: a whole number, or a rounded one such as
14.7B or 135M; --source says where it and the config can be read. An entry is added only if the config is understood,
if its count agrees with the published one, and if transformers builds a model of the same count from the config, on
the meta device. A whole number must be met exactly; a rounded one within one unit of its last digit, since some authors
cut digits off; and one of two digits within a tenth, as in the name of a 7B model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ridgeline
from ridgeline.archs import spec_from_config
from ridgeline.errors import RidgelineError

DATA = Path(ridgeline.__file__).parent / "catalog" / "data" / "models.json"
UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
FOREIGN = ("_name_or_path", "transformers.js_config")  # an author's own path; settings of another program
SHARE = 0.1  # by which a count of two digits may differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="hub id of the new model; with --check, those to check")
    parser.add_argument("--config", help="path of its config.json")
    parser.add_argument("--published", help="stated count of parameters: 14770033664, 14.7B, 135M")
    parser.add_argument("--source", help="where the config and the count can be read")
    parser.add_argument("--alias", action="append", default=[], help="another name; may be repeated")
    parser.add_argument("--check", action="store_true", help="check entries, and add nothing")
    args = parser.parse_args()
    entries = json.loads(DATA.read_text(encoding="utf-8"))
    if args.check:
        chosen = [e for e in entries if (e["name"] in args.names if args.names else "published" in e)]
        problems = {e["name"]: found for e in chosen if (found := problem_of(e))}
        for name, text in problems.items():
            print(f"{name}: {text}")
        sys.exit(f"{len(problems)} of {len(chosen)} entries are wrong" if problems else 0)
    if len(args.names) != 1 or not (args.config and args.published and args.source):
        parser.error("give one name, --config, --published and --source")
    config = json.loads(Path(args.config).read_text(encoding="utf-8"))
    new = entry(args.names[0], config, args.published, args.source, args.alias)
    if (text := problem_of(new, entries)) is not None:
        sys.exit(f"{new['name']} is not added: {text}")
    write([*entries, new])
    print(f"{new['name']}: {new['params']:,} parameters, added to {DATA.name}")


def entry(name: str, config: Mapping[str, Any], published: str, source: str, aliases: list[str]) -> dict[str, Any]:
    """Return the entry of a model. Raises RidgelineError for a config that is not understood."""
    kept = {key: value for key, value in config.items() if key not in FOREIGN}
    params = spec_from_config(kept).num_params()
    return {
        "name": name, "aliases": aliases, "params": params, "published": published, "source": source, "config": kept,
    }  # fmt: skip


def problem_of(found: Mapping[str, Any], others: list[Mapping[str, Any]] | None = None) -> str | None:
    """Return why an entry is wrong; None if it is right. others: the entries that are there, if it is a new one."""
    names = {n.lower() for e in others or () for n in (e["name"], *e["aliases"])}
    if found["name"].lower() in names:
        return "there is an entry of this name"
    try:
        count = spec_from_config(found["config"]).num_params()
    except RidgelineError as e:
        return str(e)
    if count != found["params"]:
        return f"its config has {count:,} parameters, and the entry says {found['params']:,}"
    if not agrees(count, found["published"]):
        return f"its config has {count:,} parameters, and {found['published']} are published"
    built = transformers_count(found["config"])
    return None if built in (None, count) else f"its config has {count:,} parameters, and transformers builds {built:,}"


def agrees(count: int, published: str) -> bool:
    """Return whether a count is the published one, as far as the latter's digits say."""
    digits, unit = published.rstrip("KMBT"), UNITS.get(published[-1], 1)
    if unit == 1:
        return count == int(published)
    stated, last = float(digits) * unit, unit / 10 ** len(digits.partition(".")[2])
    is_short = len(digits.replace(".", "").strip("0")) <= 2
    return abs(count - stated) < max(last, SHARE * stated if is_short else 0.0)


def transformers_count(config: Mapping[str, Any]) -> int | None:
    """Return the parameters of the model that transformers builds from a config; None for a family that it lacks."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = {k: v for k, v in config.items() if k not in ("quantization_config", "model_type")}
    try:
        built = AutoConfig.for_model(config["model_type"], **plain)
    except ValueError:
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built)
    model.tie_weights()
    # The router's correction and the factor of a layer are trained, and a file has them; transformers keeps buffers.
    ends = "e_score_correction_bias", "layer_scalar"
    corrections = [b for name, b in model.named_buffers() if name.endswith(ends)]
    count = sum(p.numel() for p in {id(p): p for p in (*model.parameters(), *corrections)}.values())
    # Its experts that return their input have matrices in transformers, which no published file contains.
    ends = "gate_up_proj", "down_proj"
    parts = {name: p for name, p in model.named_parameters() if name.endswith(ends) and p.ndim == 3}
    for name, own in parts.items():
        if name.endswith("gate_up_proj"):
            experts = parts[name.replace("gate_up_proj", "down_proj")].shape[0]
            count -= own.numel() // own.shape[0] * (own.shape[0] - experts)
    return count


def write(entries: list[Mapping[str, Any]]) -> None:
    """Write the catalog, two lines for each model, so that a change is one of few lines."""
    lines = []
    for e in entries:
        head = json.dumps({k: v for k, v in e.items() if k != "config"}, ensure_ascii=False)
        lines.append(f'  {head[:-1]},\n   "config": {json.dumps(e["config"], ensure_ascii=False)}}}')
    DATA.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
