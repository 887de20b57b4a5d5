"""`ridgeline serve`: the OpenAI API over HTTP."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.flags import limits
from ridgeline.cli.flags import options as o

if TYPE_CHECKING:
    from ridgeline.serve.options import ServeOptions
    from ridgeline.serve.service import Service

_SERVER = "Server"
PLANNED_SEQUENCES = 32


def _server(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_SERVER)


def _protection(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=limits.PROTECTION)


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", show_default=o.DEFAULT_MODEL,
        help="A folder, a Hugging Face hub id, or pocket, which ships with Ridgeline.",
    ),
]  # fmt: skip
ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", help="The model, as MODEL; give only one of the two.")
]
ServedModelName = Annotated[
    list[str] | None, _server("--served-model-name", help="What clients call the model; repeatable.")
]
ChatTemplateFile = Annotated[str | None, _server("--chat-template", help="A Jinja file, instead of the model's own.")]
ToolParser = Annotated[
    str | None,
    _server("--tool-call-parser", help="hermes, llama3_json or mistral; default: what the chat template suggests."),
]
UnknownFieldsChoice = Annotated[
    str,
    _server(
        "--unknown-fields",
        help="error refuses a request with fields that are not known; ignore answers it, with a warning that names "
        "them.",
    ),
]
ReasoningParser = Annotated[
    str | None, _server("--reasoning-parser", help="think; default: what the chat template suggests.")
]

MaxPromptChars = Annotated[
    int | None,
    _protection(
        "--max-prompt-chars",
        help="Largest number of characters in a text; default: the context length times the longest token's.",
    ),
]
TrustRequestChatTemplate = Annotated[
    bool,
    _protection(
        "--trust-request-chat-template",
        help="Let requests bring their own chat_template. It is rendered in a helper process with limits.",
    ),
]


def serve(
    model_argument: ModelArgument = None,
    model: ModelOption = None,
    host: Annotated[str, _server("--host", help="Where to listen; 0.0.0.0 is everywhere.")] = "127.0.0.1",
    port: Annotated[int, _server("--port", help="0 takes a free one.")] = 8000,
    served_model_name: ServedModelName = None,
    chat_template: ChatTemplateFile = None,
    tool_call_parser: ToolParser = None,
    reasoning_parser: ReasoningParser = None,
    root_path: Annotated[str, _server("--root-path", help="Of a proxy that strips it.")] = "",
    ssl_keyfile: Annotated[str | None, _server("--ssl-keyfile", help="For HTTPS.")] = None,
    ssl_certfile: Annotated[str | None, _server("--ssl-certfile", help="For HTTPS.")] = None,
    api_key: Annotated[
        list[str] | None,
        _protection("--api-key", help="Clients must send one; repeatable. Others can read it in the process list."),
    ] = None,
    api_key_file: Annotated[
        str | None, _protection("--api-key-file", help="Keys, one a line. Also: the environment's RIDGELINE_API_KEY.")
    ] = None,
    max_concurrency_per_key: Annotated[
        int | None, _protection("--max-concurrency-per-key", help="Requests of one key at once.")
    ] = None,
    max_waiting: Annotated[
        int, _protection("--max-waiting", help="Answers that may wait for the engine; more are refused with 429.")
    ] = 1024,
    max_body_bytes: Annotated[int, _protection("--max-body-bytes", help="Of a request.")] = 16 << 20,
    max_prompt_chars: MaxPromptChars = None, trust_request_chat_template: TrustRequestChatTemplate = False,
    allowed_origins: limits.AllowedOrigins = None, allowed_hosts: limits.AllowedHosts = None,
    max_connections: limits.MaxConnections = 4096, timeout_headers: limits.TimeoutHeaders = 10.0,
    timeout_body: limits.TimeoutBody = 30.0, timeout_keep_alive: limits.TimeoutKeepAlive = 75.0,
    timeout_write: limits.TimeoutWrite = 60.0, timeout_heartbeat: limits.TimeoutHeartbeat = 5.0,
    timeout_engine: limits.TimeoutEngine = 60.0, timeout_step: limits.TimeoutStep = 600.0,
    shutdown_timeout: Annotated[
        int, _server("--shutdown-timeout", help="Seconds that what is open may take after SIGTERM; then it is cut off.")
    ] = 30,
    unknown_fields: UnknownFieldsChoice = "error",
    log_requests: Annotated[bool, _protection("--log-requests", help="Write prompts into the log.")] = False,
    otlp_traces_endpoint: Annotated[
        str | None,
        _server("--otlp-traces-endpoint", help="Collector for OpenTelemetry spans, as in http://localhost:4318/v1/traces."),
    ] = None,
    quiet: Annotated[bool, _server("--quiet", "-q", help="No line for each request.")] = False,
    tokenizer: o.TokenizerName = None, device: o.Device = "auto", dtype: o.DType = "auto",
    weights: o.WeightFormat = "auto", max_model_len: o.MaxModelLen = None, load_format: o.LoadFormat = "auto",
    revision: o.Revision = None, ops: o.Ops = None, threads: o.Threads = None,
    max_num_seqs: o.MaxNumSeqs = None, max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    block_size: o.BlockSize = None, state_snapshot_tokens: o.CheckpointTokens = None,
    kv_cache_memory_bytes: o.KVCacheMemoryBytes = None, kv_cache_dtype: o.KVCacheDType = "auto",
    swap_space_bytes: o.SwapSpaceBytes = None, steps_in_flight: o.StepsInFlight = None, seed: o.Seed = 0,
) -> None:  # fmt: skip
    """Serve a model with OpenAI's API. Ctrl-C or SIGTERM: what is open may end; a second one ends at once."""
    _serve(locals())


def _serve(given: dict[str, Any]) -> None:
    """given: every option of the command, by its name."""
    from ridgeline.cli.flags.loading import find
    from ridgeline.cli.show.report import say
    from ridgeline.serve.server import run

    model = which_model(given["model_argument"], given["model"])
    options = serve_options(given, given["served_model_name"] or [model])
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # its warnings are of what strangers send, a line for each
    if given["quiet"]:
        logging.getLogger("ridgeline.serve.http.guard").setLevel(logging.WARNING)
    find(model, given["revision"], given["load_format"])  # a download shows its progress here; an error comes at once
    run(
        model, o.llm_options(given), options, on_loading=lambda loading: None, on_ready=_say_ready,
        on_bound=lambda url: say(f"{options.names[0]} will be served at {url} as soon as it is loaded"),
    )  # fmt: skip


def which_model(argument: str | None, option: str | None) -> str:
    """The model that a command names as an argument or with --model. Raises RequestError for two of them."""
    from ridgeline.errors import RequestError

    if argument is not None and option not in (None, argument):
        raise RequestError(f"the model is {argument} and --model is {option}; give one of them")
    return argument or option or o.DEFAULT_MODEL


# Numbers of requests and of what they carry, which may not be negative.
AT_LEAST = (
    "max_waiting", "max_concurrency_per_key", "max_body_bytes", "max_prompt_chars", "shutdown_timeout",
    "max_connections",
)  # fmt: skip


def serve_options(given: Mapping[str, Any], names: Sequence[str]) -> ServeOptions:
    """Those of a command's parameters that are a server's. names: of the model. Raises RequestError."""
    from ridgeline.errors import RequestError
    from ridgeline.serve.api import reasoning, tools
    from ridgeline.serve.http.unknown import UNKNOWN_FIELDS
    from ridgeline.serve.options import ENVIRONMENT_KEYS, ServeOptions, read_keys

    for name, known in (("tool_call_parser", tools.PARSERS), ("reasoning_parser", reasoning.PARSERS)):
        if given[name] not in (None, *known):
            raise RequestError(f"--{name.replace('_', '-')} {given[name]}: known are {', '.join(known)}")
    if (unknown := given.get("unknown_fields", "error")) not in UNKNOWN_FIELDS:
        raise RequestError(f"--unknown-fields is {unknown}; it must be {' or '.join(UNKNOWN_FIELDS)}")
    if (given.get("ssl_keyfile") is None) != (given.get("ssl_certfile") is None):
        raise RequestError("--ssl-keyfile and --ssl-certfile belong together: give both")
    for name in AT_LEAST:
        least = int(name == "max_connections")
        if given.get(name) is not None and given[name] < least:
            raise RequestError(f"--{name.replace('_', '-')} is {given[name]}; it must be at least {least}")
    several = {"allowed_origins", "allowed_hosts"}
    same = {field.name for field in fields(ServeOptions)} - {"names", "chat_template"} - several
    lists: dict[str, Any] = {name: tuple(given.get(name) or ()) for name in several}
    environment = os.environ.pop(ENVIRONMENT_KEYS, None)  # the engine and other children need not know the keys
    return ServeOptions(
        names=tuple(names), key_hashes=read_keys(given.get("api_key") or (), given.get("api_key_file"), environment),
        chat_template=_template(given["chat_template"]), timeouts=limits.timeouts_of(given),
        patience=limits.patience_of(given), **lists,
        **{name: given[name] for name in same & set(given)},
    )  # fmt: skip


def _template(file: str | None) -> str | None:
    from pathlib import Path

    from ridgeline.errors import RequestError

    try:
        return None if file is None else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise RequestError(f"--chat-template {file}: {e}") from None


def _say_ready(service: Service, url: str) -> None:
    """The plan, where the server is, and a line to try it with."""
    from ridgeline.cli.flags.settings import settings_tables
    from ridgeline.cli.show.report import say, say_tables
    from ridgeline.serve.api.example import curl_line
    from ridgeline.serve.options import LOOPBACK

    ready, options = service.ready, service.options
    say(*(f"note: {note}" for note in ready.notes))
    say_tables(*settings_tables("engine", ready.config, ready.weight_bytes, on_host=ready.on_host))
    say(_plan(service))
    for name, given, found in (
        ("tool_call_parser", options.tool_call_parser, service.tool_parser),
        ("reasoning_parser", options.reasoning_parser, service.reasoning_parser),
    ):
        say(f"{name:<24}{found or 'none':<12}{_why(given, found)}")
    if options.host not in LOOPBACK and not options.key_hashes:
        say(f"warning: everybody who reaches {options.host} may use this server: no API key is set")
    say(f"serving {service.name} at {url} (API: {url}/docs)")
    print(curl_line(service, url), file=sys.stderr, flush=True)  # in one piece, to be copied


def _plan(service: Service) -> str:
    """What the cost model expects of a full step."""
    config, context = service.ready.config, service.max_model_len // 2
    batch = min(config.max_num_seqs, PLANNED_SEQUENCES)
    cost = service.ledger.cost(((1, context, 1),) * batch)
    hardware = service.ledger.deployment.hardware
    expected, source = f"{cost.seconds * 1e3:.2g} ms a step, {batch / cost.seconds:,.0f} tokens/s", hardware.sources
    if hardware.rates is None:
        expected += f" at the roof, {source['bandwidth']} (ridgeline calibrate: times as they will be)"
    else:
        expected += f", {cost.roof_s / cost.seconds:.0%} of the roof ({source['bandwidth']})"
    return f"{'expected':<24}{batch} sequences at {context:,} tokens: {expected}"


def _why(given: str | None, found: str | None) -> str:
    if given is not None:
        return "as given"
    return "what the chat template writes" if found else "the chat template shows no known format"
