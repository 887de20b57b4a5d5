"""A sampling parameter is declared once; flags, fields, form and documentation follow from its declaration."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from ridgeline.cli.chat import SAMPLING as CHAT
from ridgeline.cli.flags.groups import grouped
from ridgeline.cli.flags.sampling import SamplingFlags, default_text, params_of
from ridgeline.cli.generate import SAMPLING as GENERATE
from ridgeline.errors import RequestError
from ridgeline.serve.api.sampling_fields import RESPONSE_FIELDS
from ridgeline.serve.api.types import ChatBody, CompletionBody
from ridgeline.serve.api.types_responses import ResponseBody
from ridgeline.serve.http.form import form_script
from ridgeline.spec.parameters import Stage
from ridgeline.spec.request import BEAM_SEARCH, SAMPLING, BeamSearchParams, SamplingParams

DOCS = Path(__file__).parents[2] / "docs" / "generate.md"
CHANGING = (Stage.MASK, Stage.BIAS, Stage.PENALTY, Stage.TEMPERATURE, Stage.FILTER)


def table() -> str:
    """Return the table of parameters in docs/generate.md."""
    rows = ["| parameter | values | default | meaning |", "|---|---|---|---|"]
    for one in SAMPLING:
        plain = f"`{default_text(one)}`" if one.default not in (None, ()) and not one.parameter.recommended else ""
        default = plain or (f"`{one.default}`" if one.parameter.recommended else default_text(one))
        rows.append(f"| `{one.name}` | {one.parameter.limits()} | {default} | {one.parameter.help} |")
    return "\n".join(rows)


def test_the_documentation_has_the_declared_parameters() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert table() in text, f"replace the table of parameters in docs/generate.md by:\n{table()}"


def test_the_documentation_states_the_order_of_the_declarations() -> None:
    """The list of steps contains every parameter that changes logits, in the order of the declarations."""
    steps = DOCS.read_text(encoding="utf-8").split("\n## Sampling\n")[1].split("\n\n| parameter")[0]
    for stage in (Stage.BIAS, Stage.PENALTY, Stage.TEMPERATURE, Stage.FILTER):
        names = [name for name, _, one in SAMPLING if one.stage is stage and one.flag]
        indices = [steps.index(f"`{name}`") for name in names]
        assert indices == sorted(indices), f"{stage.value}: {names}"
    order = [one.parameter.stage for one in SAMPLING if one.parameter.stage in CHANGING]
    assert order == sorted(order, key=CHANGING.index)


def test_every_parameter_says_what_it_does() -> None:
    for one in (*SAMPLING, *BEAM_SEARCH):
        text = one.parameter.help
        assert re.match(r"[A-Z]", text) and text.endswith("."), one.name
        assert one.parameter.limits() and isinstance(one.parameter.schema(), dict)
        assert one.name in (SamplingParams.__doc__ or "") + (BeamSearchParams.__doc__ or "")


def test_flags_follow_from_the_declarations() -> None:
    names = {one.name for one in GENERATE.parameters()}
    assert names == {one.name for one in (*SAMPLING, *BEAM_SEARCH) if one.parameter.flag} - {"seed"}
    assert {"top_n_sigma", "xtc_probability", "dry_multiplier", "temperature", "stop"} <= {
        one.name for one in CHAT.parameters()
    }
    for argument in (*GENERATE.arguments(), *CHAT.arguments()):
        (option,) = (m for m in get_args(argument.annotation) if isinstance(m, typer.models.OptionInfo))
        takes_value = argument.default is None
        assert option.help and ("Default: " in option.help) is takes_value, argument.name


def given(*args: str, flags: SamplingFlags = GENERATE) -> dict[str, Any]:
    """Return the parameters that a command gets from these flags."""
    from typing import Annotated

    from typer.testing import CliRunner

    found: list[Any] = []

    def command(*, sampling: Annotated[Any, flags]) -> None:
        found.append(sampling)

    command.__annotations__ = {"sampling": Annotated[Any, flags], "return": None}
    app = typer.Typer()
    app.command()(grouped(command))
    result = CliRunner().invoke(app, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return dict(found[0])


def test_flags_become_parameters() -> None:
    assert given() == {}
    assert given(
        "-n", "3", "--top-n-sigma", "1.5", "--dry-multiplier", "0.8", "--dry-sequence-breakers", ".",
        "--xtc-probability", "0.5", "--no-skip-special-tokens", "--ignore-eos", "--stop", "a", "--stop", "b",
        "--logit-bias", "5=-1", "--bad-token-ids", "4", "--logprobs-mode", "processed", "--early-stopping", "True",
    ) == {
        "n": 3, "top_n_sigma": 1.5, "dry_multiplier": 0.8, "dry_sequence_breakers": ["."], "xtc_probability": 0.5,
        "skip_special_tokens": False, "ignore_eos": True, "stop": ["a", "b"], "logit_bias": {5: -1.0},
        "bad_token_ids": [4], "logprobs_mode": "processed", "early_stopping": True,
    }  # fmt: skip
    kind, fields = params_of(given("--beam-width", "4", "--early-stopping", "never", "--min-tokens", "0"))
    assert kind is BeamSearchParams and fields == {"n": 1, "beam_width": 4, "early_stopping": "never"}
    with pytest.raises(RequestError, match="--top-k has no effect with --beam-width"):
        params_of(given("--beam-width", "4", "--top-k", "3"))


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_bodies_have_the_declared_fields(body: Any) -> None:
    properties = body.model_json_schema()["properties"]
    for name, _, one in SAMPLING:
        ours = name == "logprobs" or (name == "suffix" and body is CompletionBody)  # declared by the body itself
        assert (name in properties) is (one.api or ours), name
        if one.schema() and name != "max_tokens" and one.api:
            shown = str(properties[name])
            assert all(f"'{key}': {value}" in shown for key, value in one.schema().items()), name
            assert properties[name]["description"] == one.help


def test_responses_have_penalties_and_filters() -> None:
    assert {"top_n_sigma", "dry_base", "xtc_threshold", "temperature", "seed", "bad_words"} <= set(RESPONSE_FIELDS)
    assert set(RESPONSE_FIELDS) <= set(ResponseBody.model_fields)


def test_the_form_has_a_field_for_each_label() -> None:
    rows = json.loads(form_script().split("PARAMETERS = ")[1].rstrip(";\n"))
    assert [row[0] for row in rows] == [name for name, _, one in SAMPLING if one.label]
    limits = {name: limits for name, _, limits, _ in rows}
    assert limits["top_p"] == {"min": 0, "max": 1, "step": 0.05}
    assert limits["max_tokens"] == {"min": 1, "step": 1, "value": 128}
