"""How botocore's requests are sent: to the one endpoint, with a bound on what an answer takes."""

from typing import Any

import aiohttp
from aiobotocore.httpsession import AIOHTTPSession
from botocore.exceptions import HTTPClientError

from sglang_cake.core.errors import StoreUnavailable

MAX_PAGE_BYTES = 2**24  # a listing of 1,000 names of 1,024 characters, each escaped, and its fields
MAX_WORDS_BYTES = 2**16  # every other answer that is read whole: errors, and the answer to a put


class DirectSession(AIOHTTPSession):  # type: ignore[misc]  # aiobotocore has no types
    """botocore's session, but it follows no redirect and reads no endless body.

    aiobotocore leaves both to aiohttp, which follows ten redirects to any host, with the body and
    the session token, and reads an answer until memory is gone.
    """

    async def send(self, request: Any) -> Any:
        """As in `AIOHTTPSession`."""
        try:
            answer = await super().send(request)
        except HTTPClientError as error:
            if isinstance(error.__context__, StoreUnavailable):  # of `read`
                raise error.__context__ from None
            raise
        if not isinstance(answer.raw, _BoundedAnswer):
            raise RuntimeError("this aiobotocore sends requests in another way: use an older one")
        return answer

    async def _get_session(self, proxy_url: str | None) -> "_DirectRequests":
        return _DirectRequests(await super()._get_session(proxy_url))


class _DirectRequests:
    """The one method of an aiohttp session that `AIOHTTPSession.send` calls."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def request(self, method: str, **arguments: Any) -> "_BoundedAnswer":
        arguments["allow_redirects"] = False
        # What `send` gives beside the method is named by it; `url` is one of the names.
        answer = await self._session.request(method, **arguments)
        return _BoundedAnswer(answer, method)


class _BoundedAnswer:
    """An aiohttp response whose `read` has a bound. A block comes by `content`, piece by piece."""

    def __init__(self, answer: aiohttp.ClientResponse, method: str) -> None:
        self._answer = answer
        listing = method == "GET" and answer.status == 200
        self._at_most = MAX_PAGE_BYTES if listing else MAX_WORDS_BYTES

    def __getattr__(self, name: str) -> Any:
        return getattr(self._answer, name)

    async def read(self) -> bytes:
        """The whole body. Raises: StoreUnavailable if it is longer than its bound."""
        body = bytearray()
        async for piece in self._answer.content.iter_any():
            body += piece
            if len(body) > self._at_most:
                self._answer.close()
                raise StoreUnavailable(f"S3: an answer of more than {self._at_most} bytes")
        return bytes(body)
