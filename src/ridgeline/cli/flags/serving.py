"""Groups of options of the commands that serve a model, and the ServeOptions that they give."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ridgeline.cli.flags import limits
from ridgeline.cli.flags import options as o
from ridgeline.cli.flags import server as s
from ridgeline.cli.flags.groups import values_of

if TYPE_CHECKING:
    from ridgeline.serve.options import ServeOptions


@dataclass(eq=False, repr=False)
class ServedFlags:
    """The model that is served, its names, and the formats of its text."""

    model_argument: s.ModelArgument = None
    model_option: s.ModelOption = None
    served_model_name: s.ServedModelName = None
    lora_modules: s.LoraModules = None
    max_loras: s.MaxLoras = None
    max_lora_rank: s.MaxLoraRank = None
    chat_template: s.ChatTemplateFile = None
    tool_call_parser: s.ToolParser = None
    reasoning_parser: s.ReasoningParser = None
    unknown_fields: s.UnknownFieldsChoice = "error"

    @property
    def model(self) -> str:
        """Return the model, named as an argument or with --model. Raises RequestError for two models."""
        from ridgeline.errors import RequestError

        if self.model_argument is not None and self.model_option not in (None, self.model_argument):
            raise RequestError(
                f"MODEL is {self.model_argument} and --model is {self.model_option}; give only one of them"
            )
        given = (self.model_argument, self.model_option, o.DEFAULT_MODEL)
        return next(name for name in given if name is not None)


@dataclass(eq=False, repr=False)
class ServerFlags:
    """Address, keys, limits and logs of a server."""

    host: s.Host = "127.0.0.1"
    port: s.Port = 8000
    replicas: s.Replicas = 1
    ray: s.RayAddress = None
    root_path: s.RootPath = ""
    ssl_keyfile: s.KeyFile = None
    ssl_certfile: s.CertFile = None
    api_key: s.ApiKey = None
    api_key_file: s.ApiKeyFile = None
    api_keys: s.ApiKeys = None
    max_concurrency_per_key: s.MaxConcurrencyPerKey = None
    max_waiting: s.MaxWaiting = 1024
    max_body_bytes: s.MaxBodyBytes = 16 << 20
    max_prompt_chars: s.MaxPromptChars = None
    trust_request_chat_template: s.TrustRequestChatTemplate = False
    allowed_origins: limits.AllowedOrigins = None
    allowed_hosts: limits.AllowedHosts = None
    max_connections: limits.MaxConnections = 4096
    timeout_headers: limits.TimeoutHeaders = 10.0
    timeout_body: limits.TimeoutBody = 30.0
    timeout_keep_alive: limits.TimeoutKeepAlive = 75.0
    timeout_write: limits.TimeoutWrite = 60.0
    timeout_heartbeat: limits.TimeoutHeartbeat = 5.0
    timeout_engine: limits.TimeoutEngine = 60.0
    timeout_step: limits.TimeoutStep = 600.0
    shutdown_timeout: s.ShutdownTimeout = 30
    log_requests: s.LogRequests = False
    otlp_traces_endpoint: s.TracesEndpoint = None
    quiet: s.Quiet = False
    allow_runtime_lora_updating: s.RuntimeLora = False
    server_dev_mode: s.DevMode = False
    enable_tokenizer_info_endpoint: s.TokenizerInfo = False


# Options that may not be negative.
AT_LEAST = (
    "max_waiting", "max_concurrency_per_key", "max_body_bytes", "max_prompt_chars", "shutdown_timeout",
    "max_connections",
)  # fmt: skip


def serve_options(served: ServedFlags, server: ServerFlags, seed: int) -> ServeOptions:
    """Return the options of a server from a command's flags. Raises RequestError."""
    from ridgeline.cli.flags.serve_flags import read_options
    from ridgeline.errors import RequestError
    from ridgeline.serve.api import reasoning, tools
    from ridgeline.serve.http.unknown import UNKNOWN_FIELDS
    from ridgeline.serve.keys import OPTION, keys_of
    from ridgeline.serve.options import ENVIRONMENT_KEYS, ServeOptions, read_keys

    for name, known in (("tool_call_parser", tools.PARSERS), ("reasoning_parser", reasoning.PARSERS)):
        if (parser := getattr(served, name)) not in (None, *known):
            raise RequestError(f"--{name.replace('_', '-')} is {parser}; it must be {' or '.join(known)}")
    if served.unknown_fields not in UNKNOWN_FIELDS:
        raise RequestError(f"--unknown-fields is {served.unknown_fields}; it must be {' or '.join(UNKNOWN_FIELDS)}")
    if (server.ssl_keyfile is None) != (server.ssl_certfile is None):
        raise RequestError("--ssl-keyfile and --ssl-certfile need each other; give both")
    for name in AT_LEAST:
        least = int(name == "max_connections")
        if (value := getattr(server, name)) is not None and value < least:
            raise RequestError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    given = values_of(served, server, seed=seed)
    environment = os.environ.pop(ENVIRONMENT_KEYS, None)  # child processes must not see the keys
    api_keys = {} if server.api_keys is None else keys_of(read_options(server.api_keys, OPTION), server.api_keys)
    names = tuple(served.served_model_name or [served.model])
    different: dict[str, Any] = {
        "names": names,
        "key_hashes": (*read_keys(server.api_key or (), server.api_key_file, environment), *api_keys),
        "api_keys": api_keys, "adapters": modules_of(served.lora_modules or (), names),
        "chat_template": _template(served.chat_template),
        "allowed_origins": tuple(server.allowed_origins or ()), "allowed_hosts": tuple(server.allowed_hosts or ()),
        "timeouts": limits.timeouts_of(given), "patience": limits.patience_of(given),
    }  # fmt: skip
    same = {field.name for field in fields(ServeOptions)} - different.keys()
    return ServeOptions(**different, **{name: given[name] for name in same})


def modules_of(given: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return the folders or hub ids of adapters by name. names: names of the model. Raises RequestError."""
    from ridgeline.errors import RequestError

    found: dict[str, str] = {}
    for text in given:
        name, equals, source = text.partition("=")
        if not (name and equals and source):
            raise RequestError(f"--lora-modules {text!r:.200}: give NAME=PATH, as in mine=adapters/mine")
        if name in found or name in names:
            raise RequestError(f"--lora-modules {text!r:.200}: the name {name!r} is given twice; take another one")
        found[name] = source
    return found


def adapter_arguments(served: ServedFlags, options: ServeOptions) -> dict[str, Any]:
    """Return the arguments of LLM for adapters. Raises RequestError for limits that leave no room."""
    from ridgeline.errors import RequestError

    count = len(options.adapters) if served.max_loras is None else served.max_loras
    if count < len(options.adapters):
        raise RequestError(f"--max-loras is {count}, but --lora-modules names {len(options.adapters)}; raise it")
    if options.allow_runtime_lora_updating and not count:
        raise RequestError("--allow-runtime-lora-updating needs room for adapters; give --max-loras")
    if not count:
        return {}
    return {"lora_modules": dict(options.adapters), "max_loras": count, "max_lora_rank": served.max_lora_rank}


def _template(file: str | None) -> str | None:
    from pathlib import Path

    from ridgeline.errors import RequestError

    try:
        return None if file is None else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise RequestError(f"--chat-template {file}: {e}") from None
