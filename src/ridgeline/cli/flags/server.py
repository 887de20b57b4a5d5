"""Options of `serve` about the address, the names and formats of the model, keys, and sizes of requests."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ridgeline.cli.flags.limits import PROTECTION
from ridgeline.cli.flags.options import DEFAULT_MODEL

_SERVER = "Server"


def _server(*names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=_SERVER)


def _protection(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=PROTECTION)


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", show_default=DEFAULT_MODEL,
        help="Model: a checkpoint folder, a GGUF file, a Hugging Face hub id, or pocket, the built-in model.",
    ),
]  # fmt: skip
ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", help="Model, as an alternative to the argument MODEL. Default: MODEL.")
]
ServedModelName = Annotated[
    list[str] | None,
    _server(
        "--served-model-name",
        help="Name of the model in requests and answers. May be given several times; answers have the first name. "
        "Default: MODEL.",
    ),
]
LoraModules = Annotated[
    list[str] | None,
    _server(
        "--lora-modules",
        metavar="NAME=PATH",
        help="Adapters: the name that requests give as their model, and the folder or hub id. May be given several "
        "times. Default: none.",
    ),
]
MaxLoras = Annotated[
    int | None,
    _server(
        "--max-loras",
        help="Most adapters that are loaded at one time. Each takes memory for terms of --max-lora-rank beside all "
        "matrices. Default: the number of --lora-modules.",
    ),
]
MaxLoraRank = Annotated[
    int | None,
    _server("--max-lora-rank", help="Largest rank of an adapter. Default: that of --lora-modules, or 16."),
]
RuntimeLora = Annotated[
    bool,
    _server(
        "--allow-runtime-lora-updating",
        help="Serve /v1/load_lora_adapter and /v1/unload_lora_adapter. A client who may call them can make the server "
        "read any folder, so use API keys. It needs --max-loras.",
    ),
]
Replicas = Annotated[
    int,
    _server(
        "--replicas",
        help="Number of engines with a copy of the model each, behind this one address. Requests go where their prompt "
        "is computed already, and go on elsewhere if an engine ends. CPUs share cores and memory among them; with GPUs "
        "each has its own. Raise it with several GPUs or sockets.",
    ),
]
RayAddress = Annotated[
    str | None,
    _server(
        "--ray",
        metavar="ADDRESS",
        help="Ray cluster whose machines run the replicas: HOST:PORT, auto for the cluster of this machine, or local, "
        "which starts Ray on this machine alone. Default: engines on this machine, without Ray.",
    ),
]
ChatTemplateFile = Annotated[
    str | None,
    _server("--chat-template", help="File with a chat template in Jinja. Default: the model's own chat template."),
]
ToolParser = Annotated[
    str | None,
    _server(
        "--tool-call-parser",
        help="Format of tool calls in the model's text: hermes, llama3_json or mistral. Default: detected from the "
        "chat template.",
    ),
]
UnknownFieldsChoice = Annotated[
    str,
    _server(
        "--unknown-fields",
        help="Treatment of request fields that the server does not support. error: answer 400. ignore: answer without "
        "them and name them in a warning.",
    ),
]
ReasoningParser = Annotated[
    str | None,
    _server(
        "--reasoning-parser",
        help="Format of reasoning in the model's text: think (<think>...</think>). Default: detected from the chat "
        "template.",
    ),
]

MaxPromptChars = Annotated[
    int | None,
    _protection(
        "--max-prompt-chars",
        help="Largest number of characters in one prompt. Default: the context length in tokens times the number of "
        "characters of the longest token.",
    ),
]
TrustRequestChatTemplate = Annotated[
    bool,
    _protection(
        "--trust-request-chat-template",
        help="Accept the field chat_template in requests. Such a template is rendered in a helper process with limits "
        "on time and memory.",
    ),
]
Host = Annotated[str, _server("--host", help="Address to listen on. 0.0.0.0 listens on all network interfaces.")]
Port = Annotated[int, _server("--port", help="TCP port to listen on. 0 takes a free port.")]
RootPath = Annotated[
    str, _server("--root-path", help="Path prefix that a proxy removes before it forwards requests. Default: none.")
]
KeyFile = Annotated[
    str | None, _server("--ssl-keyfile", help="File with the private key for HTTPS (PEM). Default: plain HTTP.")
]
CertFile = Annotated[
    str | None, _server("--ssl-certfile", help="File with the certificate for HTTPS (PEM). Default: plain HTTP.")
]
ShutdownTimeout = Annotated[
    int,
    _server(
        "--shutdown-timeout",
        help="Seconds that running requests may take to finish after Ctrl-C or SIGTERM. The server then ends them with "
        "an error.",
    ),
]
TracesEndpoint = Annotated[
    str | None,
    _server(
        "--otlp-traces-endpoint",
        help="URL of an OpenTelemetry collector, such as http://localhost:4318/v1/traces. Each request sends one span. "
        "Default: no spans.",
    ),
]
Quiet = Annotated[bool, _server("--quiet", "-q", help="Do not log a line for each request.")]
DevMode = Annotated[
    bool,
    _protection(
        "--server-dev-mode",
        help="Serve the endpoints /sleep, /wake_up, /is_sleeping and /reset_prefix_cache, which affect all users. "
        "Set it only where every client may use them.",
    ),
]
TokenizerInfo = Annotated[
    bool,
    _server(
        "--enable-tokenizer-info-endpoint",
        help="Serve /tokenizer_info, which returns the chat template and the special tokens.",
    ),
]
ApiKey = Annotated[
    list[str] | None,
    _protection(
        "--api-key",
        help="API key that clients must send. May be given several times. Other users of this machine can read it in "
        "the process list; --api-key-file is safer. Default: no key is needed.",
    ),
]
ApiKeyFile = Annotated[
    str | None,
    _protection(
        "--api-key-file",
        help="File with API keys, one per line. Keys in the environment variable RIDGELINE_API_KEY count too. "
        "Default: no file.",
    ),
]
ApiKeys = Annotated[
    str | None,
    _protection(
        "--api-keys",
        help="YAML, TOML or JSON file with a list `keys` of API keys with limits of their own: key, name, "
        "requests_per_minute, tokens_per_minute, and weight, the key's share of the queue. Default: no file.",
    ),
]
MaxConcurrencyPerKey = Annotated[
    int | None,
    _protection("--max-concurrency-per-key", help="Number of open requests per API key. Default: no limit."),
]
MaxWaiting = Annotated[
    int,
    _protection("--max-waiting", help="Number of sequences that may wait for the engine. Further requests get a 429."),
]
MaxBodyBytes = Annotated[int, _protection("--max-body-bytes", help="Largest size of a request's body, in bytes.")]
LogRequests = Annotated[bool, _protection("--log-requests", help="Write the prompts of requests to the log.")]
