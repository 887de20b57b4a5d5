"""GET /live and GET /plan: the figures that the page shows.

Times are in seconds, memory in bytes. Counters start at 0 with each engine process.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

from ridgeline.measure.served import describe
from ridgeline.serve.api.example import example_of
from ridgeline.serve.engine.client import EngineDown
from ridgeline.serve.engine.messages import Report
from ridgeline.serve.engine.meters import RECENT_SECONDS, RecentHistogram
from ridgeline.serve.service import Service
from ridgeline.system import resident_bytes

ENGINE = ("steps", "busy_s", "alive_s", "step_bytes", "step_flops")
PATIENCE_SECONDS = 2.0  # to wait for an engine that is in a long step


async def live(service: Service) -> dict[str, Any]:
    """Return the state of the server at this moment. The engine's part is left out while there is no engine."""
    client, example = service.client, example_of(service.ready.tokenizer)
    found: dict[str, Any] = {
        "model": service.name,
        "device": service.ready.device,
        "max_model_len": service.max_model_len,
        "chat": service.tokenizer is not None and service.tokenizer.chat_template is not None,
        "roles": service.knows_roles,
        "example": None if example is None else {"prompt": example.prompt, "parameters": dict(example.parameters)},
        "engine": {"state": client.health, "restarts": client.restarts},
        "replicas": client.replicas(),
    }
    try:
        report = await asyncio.wait_for(client.report(), PATIENCE_SECONDS if client.up else 0.0)
    except (TimeoutError, EngineDown):
        return found
    found["engine"] |= {name: getattr(report.meters, name) for name in ENGINE}
    return found | _engine(service, report)


def plan(service: Service) -> dict[str, Any]:
    """Return the model, the machine and the engine's settings."""
    names = ("num_pages", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
    config = service.ready.config
    return describe(service.ready.deployment, {name: getattr(config, name) for name in names}, config.draft_depth)


def _engine(service: Service, report: Report) -> dict[str, Any]:
    m, stats, config = report.meters, report.stats, service.ready.config
    groups = stats.groups if stats else ()
    return {
        "requests": {
            "running": stats.running if stats else 0, "waiting": stats.waiting if stats else 0,
            "max_running": config.max_num_seqs * service.client.engines, "refused": service.gate.refused,
        },
        "pages": [{"group": g.name, "used": g.used_pages, "total": g.num_pages} for g in groups],
        "memory": {
            "http": resident_bytes(), "engine": m.resident_bytes,
            "state": config.bytes_of(stats.resident_pages) if stats else 0,
            "max_state": config.state_bytes * service.client.engines,
        },
        "tokens": {"prompt": m.prompt_tokens, "cached": m.cached_tokens, "generated": m.generation_tokens},
        "window_s": RECENT_SECONDS,
        "ttft_s": _recent(m.ttft),
        "tpot_s": _recent(m.per_token),
        "roof": service.ledger.roof(),
        "step": service.ledger.figures(stats.last_step, m.last_step_s) if stats else None,
    }  # fmt: skip


def _recent(histogram: RecentHistogram) -> dict[str, float] | None:
    found = histogram.recent(time.perf_counter())
    return asdict(found) if found else None
