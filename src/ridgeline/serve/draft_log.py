"""Log what drafts gained: every few minutes while some are verified, and when the server stops."""

from __future__ import annotations

import asyncio
import logging

from ridgeline.sched.draft_report import draft_report
from ridgeline.serve.engine.client import EngineDown
from ridgeline.serve.engine.handle import EngineHandle

LOG_SECONDS = 600.0
PATIENCE_SECONDS = 2.0  # for the engine's answer
log = logging.getLogger(__name__)


class DraftLog:
    """Logs the report of one engine's drafts."""

    def __init__(self, client: EngineHandle) -> None:
        self._client, self._logged = client, 0  # verifications of the last report

    async def run(self, seconds: float = LOG_SECONDS) -> None:
        """Log every `seconds` until it is cancelled."""
        while True:
            await asyncio.sleep(seconds)
            await self.once()

    async def once(self) -> None:
        """Log the drafts so far, unless none were verified since the last time or the engine does not answer."""
        if not self._client.up:
            return
        try:
            stats = (await asyncio.wait_for(self._client.report(), PATIENCE_SECONDS)).stats
        except (TimeoutError, EngineDown):
            return
        if stats is None or stats.drafts.verifications == self._logged:
            return
        self._logged = stats.drafts.verifications
        report = draft_report(stats.proposer, stats.drafts, stats.draft_speed, stats.draft_acceptance, stats.untreed)
        for line in report:
            log.info("%s", line)
