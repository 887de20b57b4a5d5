"""What a server is started with, besides its model. Names are vLLM's where it has one."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.errors import RequestError
from ridgeline.serve.engine.watch import Patience
from ridgeline.serve.http.connections import Timeouts
from ridgeline.serve.http.unknown import UnknownFields

ENVIRONMENT_KEYS = "RIDGELINE_API_KEY"  # one, or several with commas between
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where to listen, whom to serve, and how much.

    names: of the model, as clients may call it; the first is what answers say. key_hashes: of the API keys; none: all
    may ask. max_waiting: answers that may wait for a place in the engine. max_concurrency_per_key: requests of one key
    at once; None: no limit. max_body_bytes: of a request.
    max_prompt_chars: characters of one text that is tokenized; None: as many as fill the context if each token is the
    longest one. trust_request_chat_template: requests may bring a chat template of their own.
    chat_template: Jinja, instead of the model's.
    tool_call_parser, reasoning_parser: None: what the template suggests. allowed_origins: of pages that a browser lets
    read answers (CORS). log_requests: prompts go into the log.
    unknown_fields: what becomes of a request with fields that are not known: "error", a 400 that names them, or
    "ignore", an answer whose header Warning names them.
    shutdown_timeout: seconds that what is open may take after a signal. otlp_traces_endpoint: of
    a collector that is sent a span for each request. timeouts: of clients. max_connections: at once. allowed_hosts:
    names besides those of this machine that a Host header may have where there are no keys; "*" is all. patience: with
    an engine that hangs.
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

    def key_of(self, given: bytes) -> bytes | None:
        """The hash of a key that is known. Takes as long for a wrong one as for a right one."""
        digest, found = hashlib.sha256(given).digest(), None
        for known in self.key_hashes:
            if hmac.compare_digest(digest, known):
                found = known
        return found


def read_keys(given: Iterable[str], file: str | None, environment: str | None) -> tuple[bytes, ...]:
    """Hashes of all keys: those given, those of a file (one a line, # begins a remark), those of the environment.

    Raises RequestError for a file that cannot be read or has none.
    """
    keys = [*given, *(environment or "").split(",")]
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise RequestError(f"--api-key-file {file}: {e}") from None
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise RequestError(f"--api-key-file {file} has no keys; write one a line, or leave the option out")
        keys += found
    return tuple(hashlib.sha256(key.strip().encode()).digest() for key in keys if key.strip())
