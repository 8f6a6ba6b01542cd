"""The endpoint's learner as the ingress sees it: asked what it does."""

from __future__ import annotations

import asyncio
import logging

from ray.serve.handle import DeploymentHandle

from pipeline.progress.reports import LearningReport

_REPORT_SECONDS = 5.0

logger = logging.getLogger("ray.serve")


class LearnerHandle:
    """Asks the deployment that keeps the learner.

    Args:
        handle: Its handle.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def report(self) -> LearningReport | None:
        """Return what the learner does; None where nobody can say."""
        try:
            return await asyncio.wait_for(self._handle.report.remote(), _REPORT_SECONDS)
        except Exception as error:  # whatever it is: Ray Serve starts it again, and nothing depends on it
            logger.warning("The learner does not answer: %s", error)
            return None
