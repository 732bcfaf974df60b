"""Which answer an error becomes."""

import logging

from aiohttp import web

from sglang_cake.core.errors import BlockCorrupt, BlockMissing, StoreFull, StoreUnavailable
from sglang_cake.stores.http.request_body import Refused

logger = logging.getLogger(__name__)


def refusal_of(error: Exception, method: str, path: str) -> Refused:
    """What a client is told of an error; what is the server's own fault is logged."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, BlockCorrupt) and method == "PUT":
        return Refused(400, f"the block {error}")
    if isinstance(error, BlockMissing | BlockCorrupt):
        return Refused(404, "no such block")
    if isinstance(error, StoreFull):
        return Refused(507, str(error))
    if isinstance(error, StoreUnavailable):
        logger.warning("%s %s: %s", method, path, error)
        return Refused(503, str(error))
    if isinstance(error, TimeoutError):
        return Refused(408, "too slow")
    if isinstance(error, web.RequestPayloadError):
        return Refused(400, "the body broke off")
    if isinstance(error, ConnectionError):
        return Refused(400, "the connection broke off")
    logger.error("%s %s failed", method, path, exc_info=error)
    return Refused(500, "the server failed; its log says how")
