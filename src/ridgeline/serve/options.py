"""Options of a server, except those of its model. They have vLLM's names where vLLM has the same option."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.errors import RequestError
from ridgeline.serve.engine.watch import Patience
from ridgeline.serve.http.connections import Timeouts
from ridgeline.serve.http.unknown import UnknownFields
from ridgeline.serve.keys import ApiKey

ENVIRONMENT_KEYS = "RIDGELINE_API_KEY"  # one key, or several separated by commas
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of a server.

    Args:
        names: names of the model that requests may use. Answers have the first one.
        host: address to listen on.
        port: TCP port to listen on; 0 takes a free one.
        key_hashes: SHA-256 hashes of the API keys. If empty, no key is needed.
        max_waiting: number of sequences that may wait for the engine.
        max_concurrency_per_key: number of open requests per API key; None means no limit.
        max_body_bytes: largest size of a request's body.
        max_prompt_chars: largest number of characters of one text. None allows the text length that fills the context
            if every token is the longest one.
        trust_request_chat_template: accept the field chat_template in requests.
        chat_template: chat template in Jinja; None takes the model's own.
        tool_call_parser: name of the parser of tool calls; None detects it from the chat template.
        reasoning_parser: name of the parser of reasoning; None detects it from the chat template.
        allowed_origins: web sites whose pages may read answers (CORS).
        log_requests: write prompts to the log.
        unknown_fields: "error" answers a request with unknown fields with a 400 that names them. "ignore" answers
            without them and names them in the header Warning.
        shutdown_timeout: seconds that running requests may take to finish after a signal.
        ssl_keyfile: file with the private key for HTTPS.
        ssl_certfile: file with the certificate for HTTPS.
        root_path: path prefix that a proxy removes before it forwards requests.
        otlp_traces_endpoint: URL of an OpenTelemetry collector; None sends no spans.
        seed: seed for requests without a seed of their own.
        timeouts: timeouts of connections.
        max_connections: number of open connections.
        allowed_hosts: further names of this server that a Host header may have if there are no API keys. "*" allows
            all names.
        patience: limits on an engine that hangs.
        api_keys: keys with limits of their own, by SHA-256 hash; their hashes are in key_hashes too.
        server_dev_mode: serve the endpoints that affect all users: sleep, wake and the reset of the prefix cache.
        adapters: folders or hub ids of adapters by name; requests name one as their model.
        allow_runtime_lora_updating: serve the endpoints that load and drop adapters.
        enable_tokenizer_info_endpoint: serve /tokenizer_info, which has the chat template.
    """

    names: Sequence[str]
    host: str = "127.0.0.1"
    port: int = 8000
    key_hashes: tuple[bytes, ...] = ()
    max_waiting: int = 1024
    max_concurrency_per_key: int | None = None
    max_body_bytes: int = 16 << 20
    max_prompt_chars: int | None = None
    trust_request_chat_template: bool = False
    chat_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    allowed_origins: tuple[str, ...] = ()
    log_requests: bool = False
    unknown_fields: UnknownFields = "error"
    shutdown_timeout: int = 30
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    root_path: str = ""
    otlp_traces_endpoint: str | None = None
    seed: int = 0
    timeouts: Timeouts = field(default_factory=Timeouts)
    max_connections: int = 4096
    allowed_hosts: tuple[str, ...] = ()
    patience: Patience = field(default_factory=Patience)
    api_keys: Mapping[bytes, ApiKey] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    allow_runtime_lora_updating: bool = False
    server_dev_mode: bool = False
    enable_tokenizer_info_endpoint: bool = False

    def key_of(self, given: bytes) -> bytes | None:
        """Return the hash of a valid API key, else None. The time does not depend on the key."""
        digest, found = hashlib.sha256(given).digest(), None
        for known in self.key_hashes:
            if hmac.compare_digest(digest, known):
                found = known
        return found


def read_keys(given: Iterable[str], file: str | None, environment: str | None) -> tuple[bytes, ...]:
    """Return the hashes of all API keys.

    given: keys. file: file with one key per line; lines that begin with # are comments. environment: keys separated by
    commas. Raises RequestError for a file that cannot be read or has no keys.
    """
    keys = [*given, *(environment or "").split(",")]
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
            raise RequestError(
                f"--api-key-file: cannot read {file}: {reason}; name a file with one key in each line"
            ) from None
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise RequestError(f"--api-key-file {file} has no keys; write one key per line or leave the option out")
        keys += found
    return tuple(hashlib.sha256(key.strip().encode()).digest() for key in keys if key.strip())
