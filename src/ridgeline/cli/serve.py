"""`ridgeline serve`: serve a model with the OpenAI API over HTTP."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ridgeline.cli.flags import options as o
from ridgeline.cli.flags.groups import EngineFlags, LoadFlags, grouped, llm_arguments
from ridgeline.cli.flags.serving import ServedFlags, ServerFlags, adapter_arguments, serve_options

if TYPE_CHECKING:
    from ridgeline.serve.options import ServeOptions
    from ridgeline.serve.service import Service

PLANNED_SEQUENCES = 32


@dataclass(frozen=True, slots=True)
class Prepared:
    """A command line of `ridgeline serve` that was read: the model, arguments of LLM, and options of the server."""

    model: str
    arguments: Mapping[str, Any]
    options: ServeOptions
    replicas: int
    ray: str | None
    quiet: bool

    def find(self) -> None:
        """Download the model with a progress bar, or fail early. Raises RidgelineError."""
        from ridgeline.cli.flags.loading import find

        find(self.model, self.arguments["revision"], self.arguments["load_format"])


def prepared(
    *,
    served: ServedFlags,
    server: ServerFlags,
    tokenizer: o.TokenizerName = None,
    load: LoadFlags,
    engine: EngineFlags,
    seed: o.Seed = 0,
) -> Prepared:
    """Return what a command line of `ridgeline serve` asks for. Raises RequestError."""
    options = serve_options(served, server, seed)
    arguments = llm_arguments(load, engine, tokenizer=tokenizer, seed=seed) | adapter_arguments(served, options)
    return Prepared(served.model, arguments, options, server.replicas, server.ray, server.quiet)


@grouped
def serve(
    *,
    served: ServedFlags,
    server: ServerFlags,
    tokenizer: o.TokenizerName = None,
    load: LoadFlags,
    engine: EngineFlags,
    seed: o.Seed = 0,
) -> None:
    """Serve a model with the OpenAI API over HTTP.

    Ctrl-C or SIGTERM stops the server: running requests may finish. Press Ctrl-C again to stop immediately.
    """
    from ridgeline.cli.show.report import say
    from ridgeline.dist import local, ray_cluster
    from ridgeline.serve.logs import start_log
    from ridgeline.serve.server import run

    asked = prepared(served=served, server=server, tokenizer=tokenizer, load=load, engine=engine, seed=seed)
    start_log(quiet=asked.quiet)
    if asked.ray is None:
        open_engine = local.opener(asked.arguments, asked.replicas)
    else:
        open_engine = ray_cluster.opener(asked.ray, asked.replicas)
    asked.find()
    run(
        asked.model, asked.arguments, asked.options, on_loading=lambda loading: None, on_ready=_say_ready,
        open_engine=open_engine,
        on_bound=lambda url: say(f"loading {asked.options.names[0]}; it will be served at {url}"),
    )  # fmt: skip


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
    """Return two lines with the time and speed that the cost model predicts for a full decode step, or for a pass of an
    encoder."""
    config, context = service.ready.config, max(1, service.max_model_len // 2)
    batch = min(config.max_num_seqs, PLANNED_SEQUENCES)
    cost = service.ledger.cost(((1, context, 1),) * batch)
    hardware = service.ledger.deployment.hardware
    speed, source = f"{cost.seconds * 1e3:.2g} ms per step, {batch / cost.seconds:,.0f} tokens/s", hardware.sources
    what = f"{batch} sequences at {context:,} tokens"
    if service.ready.spec.encoder:
        tokens = config.max_num_batched_tokens
        context = min(context, tokens)
        cost = service.ledger.cost(((context, context, 0),) * (tokens // context))
        what = f"texts of {context:,} tokens, {tokens // context} in a pass"
        speed = f"{cost.seconds * 1e3:.2g} ms per pass, {tokens // context / cost.seconds:,.0f} texts/s"
    if not hardware.is_measured:
        note = f"upper bound: the roofline, {source['bandwidth']}; run `ridgeline calibrate` for real predictions"
    else:
        note = f"{cost.roof_s / cost.seconds:.0%} of the roofline ({source['bandwidth']})"
    return f"{'predicted':<24}{what}: {speed}", f"{'':<24}{note}"


def _why(given: str | None, found: str | None) -> str:
    if given is not None:
        return "as given"
    return "detected from the chat template" if found else "the chat template has no known format"
