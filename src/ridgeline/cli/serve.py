"""`ridgeline serve`: serve a model with the OpenAI API over HTTP."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ridgeline.cli.flags import limits
from ridgeline.cli.flags import options as o
from ridgeline.cli.flags import server as s

if TYPE_CHECKING:
    from ridgeline.serve.options import ServeOptions
    from ridgeline.serve.service import Service

PLANNED_SEQUENCES = 32


def serve(
    model_argument: s.ModelArgument = None, model: s.ModelOption = None, host: s.Host = "127.0.0.1",
    port: s.Port = 8000, served_model_name: s.ServedModelName = None, chat_template: s.ChatTemplateFile = None,
    tool_call_parser: s.ToolParser = None, reasoning_parser: s.ReasoningParser = None, root_path: s.RootPath = "",
    ssl_keyfile: s.KeyFile = None, ssl_certfile: s.CertFile = None, api_key: s.ApiKey = None,
    api_key_file: s.ApiKeyFile = None, max_concurrency_per_key: s.MaxConcurrencyPerKey = None,
    max_waiting: s.MaxWaiting = 1024, max_body_bytes: s.MaxBodyBytes = 16 << 20,
    max_prompt_chars: s.MaxPromptChars = None, trust_request_chat_template: s.TrustRequestChatTemplate = False,
    allowed_origins: limits.AllowedOrigins = None, allowed_hosts: limits.AllowedHosts = None,
    max_connections: limits.MaxConnections = 4096, timeout_headers: limits.TimeoutHeaders = 10.0,
    timeout_body: limits.TimeoutBody = 30.0, timeout_keep_alive: limits.TimeoutKeepAlive = 75.0,
    timeout_write: limits.TimeoutWrite = 60.0, timeout_heartbeat: limits.TimeoutHeartbeat = 5.0,
    timeout_engine: limits.TimeoutEngine = 60.0, timeout_step: limits.TimeoutStep = 600.0,
    shutdown_timeout: s.ShutdownTimeout = 30, unknown_fields: s.UnknownFieldsChoice = "error",
    log_requests: s.LogRequests = False, otlp_traces_endpoint: s.TracesEndpoint = None, quiet: s.Quiet = False,
    tokenizer: o.TokenizerName = None, device: o.Device = "auto", dtype: o.DType = "auto",
    weights: o.WeightFormat = "auto", max_model_len: o.MaxModelLen = None, load_format: o.LoadFormat = "auto",
    revision: o.Revision = None, ops: o.Ops = None, threads: o.Threads = None,
    max_num_seqs: o.MaxNumSeqs = None, max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    block_size: o.BlockSize = None, state_snapshot_tokens: o.CheckpointTokens = None,
    kv_cache_memory_bytes: o.KVCacheMemoryBytes = None, kv_cache_dtype: o.KVCacheDType = "auto",
    swap_space_bytes: o.SwapSpaceBytes = None, steps_in_flight: o.StepsInFlight = None,
    num_speculative_tokens: o.NumSpeculativeTokens = None, seed: o.Seed = 0,
) -> None:  # fmt: skip
    """Serve a model with the OpenAI API over HTTP.

    Ctrl-C or SIGTERM stops the server: running requests may finish. Press Ctrl-C again to stop immediately.
    """
    _serve(locals())


def _serve(given: dict[str, Any]) -> None:
    """Run the server. given: the value of every option of the command, by name."""
    from ridgeline.cli.flags.loading import find
    from ridgeline.cli.show.report import say
    from ridgeline.serve.server import run

    model = which_model(given["model_argument"], given["model"])
    options = serve_options(given, given["served_model_name"] or [model])
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it warns of every malformed request
    if given["quiet"]:
        logging.getLogger("ridgeline.serve.http.guard").setLevel(logging.WARNING)
    find(model, given["revision"], given["load_format"])  # downloads the model with a progress bar, or fails early
    run(
        model, o.llm_options(given), options, on_loading=lambda loading: None, on_ready=_say_ready,
        on_bound=lambda url: say(f"loading {options.names[0]}; it will be served at {url}"),
    )  # fmt: skip


def which_model(argument: str | None, option: str | None) -> str:
    """Return the model that a command names as an argument or with --model. Raises RequestError for two models."""
    from ridgeline.errors import RequestError

    if argument is not None and option not in (None, argument):
        raise RequestError(f"MODEL is {argument} and --model is {option}; give only one of them")
    return argument or option or o.DEFAULT_MODEL


# Options that may not be negative.
AT_LEAST = (
    "max_waiting", "max_concurrency_per_key", "max_body_bytes", "max_prompt_chars", "shutdown_timeout",
    "max_connections",
)  # fmt: skip


def serve_options(given: Mapping[str, Any], names: Sequence[str]) -> ServeOptions:
    """Return the server's options among a command's parameters. names: names of the model. Raises RequestError."""
    from ridgeline.errors import RequestError
    from ridgeline.serve.api import reasoning, tools
    from ridgeline.serve.http.unknown import UNKNOWN_FIELDS
    from ridgeline.serve.options import ENVIRONMENT_KEYS, ServeOptions, read_keys

    for name, known in (("tool_call_parser", tools.PARSERS), ("reasoning_parser", reasoning.PARSERS)):
        if given[name] not in (None, *known):
            raise RequestError(f"--{name.replace('_', '-')} is {given[name]}; it must be {' or '.join(known)}")
    if (unknown := given.get("unknown_fields", "error")) not in UNKNOWN_FIELDS:
        raise RequestError(f"--unknown-fields is {unknown}; it must be {' or '.join(UNKNOWN_FIELDS)}")
    if (given.get("ssl_keyfile") is None) != (given.get("ssl_certfile") is None):
        raise RequestError("--ssl-keyfile and --ssl-certfile need each other; give both")
    for name in AT_LEAST:
        least = int(name == "max_connections")
        if given.get(name) is not None and given[name] < least:
            raise RequestError(f"--{name.replace('_', '-')} is {given[name]}; it must be at least {least}")
    several = {"allowed_origins", "allowed_hosts"}
    same = {field.name for field in fields(ServeOptions)} - {"names", "chat_template"} - several
    lists: dict[str, Any] = {name: tuple(given.get(name) or ()) for name in several}
    environment = os.environ.pop(ENVIRONMENT_KEYS, None)  # child processes must not see the keys
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
    """Print the engine's settings, the URL of the server, and a curl command that tries it."""
    from ridgeline.cli.flags.settings import settings_tables
    from ridgeline.cli.show.report import say, say_tables
    from ridgeline.serve.api.example import curl_line
    from ridgeline.serve.options import LOOPBACK

    ready, options = service.ready, service.options
    say(*(f"note: {note}" for note in ready.notes))
    say_tables(*settings_tables("engine", ready.config, ready.weight_bytes, on_host=ready.on_host))
    say("", *_predicted(service))
    for name, given, found in (
        ("tool_call_parser", options.tool_call_parser, service.tool_parser),
        ("reasoning_parser", options.reasoning_parser, service.reasoning_parser),
    ):
        say(f"{name:<24}{found or 'none':<12}{_why(given, found)}")
    if options.host not in LOOPBACK and not options.key_hashes:
        say(f"warning: no API key is set, so everybody who can reach {options.host} can use this server")
    say(f"serving {service.name} at {url} (API: {url}/docs)")
    print(curl_line(service, url), file=sys.stderr, flush=True)  # not wrapped, so that it can be copied


def _predicted(service: Service) -> tuple[str, str]:
    """Return two lines with the time and speed that the cost model predicts for a full decode step."""
    config, context = service.ready.config, service.max_model_len // 2
    batch = min(config.max_num_seqs, PLANNED_SEQUENCES)
    cost = service.ledger.cost(((1, context, 1),) * batch)
    hardware = service.ledger.deployment.hardware
    speed, source = f"{cost.seconds * 1e3:.2g} ms per step, {batch / cost.seconds:,.0f} tokens/s", hardware.sources
    if hardware.rates is None:
        note = f"upper bound: the roofline, {source['bandwidth']}; run `ridgeline calibrate` for real predictions"
    else:
        note = f"{cost.roof_s / cost.seconds:.0%} of the roofline ({source['bandwidth']})"
    return f"{'predicted':<24}{batch} sequences at {context:,} tokens: {speed}", f"{'':<24}{note}"


def _why(given: str | None, found: str | None) -> str:
    if given is not None:
        return "as given"
    return "detected from the chat template" if found else "the chat template has no known format"
