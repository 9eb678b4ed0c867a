"""What a call that is refused, or that fails, is answered with."""

from __future__ import annotations

import logging

from fastapi import Request, Response

from kvfold_service.errors import ServiceError
from kvfold_service.service import SPAN, Service

log = logging.getLogger("kvfold")


def refused(service: Service, request: Request, error: ServiceError) -> Response:
    service.metrics.refuse(error.code)
    if (span := request.scope.get(SPAN)) is not None:
        span.set_attribute("error.type", error.code)
    log.debug("%s %s is refused: %s", request.method, request.url.path, error)
    headers = {"Retry-After": str(max(1, round(error.retry_after)))} if error.retry_after else {}
    if error.code == "unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    return service.reply(request, error.body(), error.status, headers)


def broken(service: Service, request: Request, error: Exception) -> Response:
    log.error("a call failed", exc_info=error)
    service.failed(error)
    return service.reply(request, ServiceError("step_failed", "the worker failed; nothing was changed").body(), 500)
