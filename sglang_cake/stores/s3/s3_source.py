"""A bucket as a source of stores."""

import asyncio
import json
import re
import threading
from dataclasses import dataclass

from botocore.exceptions import (
    ConfigParseError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    SSLError,
)

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.errors import ConfigError, StoreError, StoreUnavailable
from sglang_cake.core.keys import Digest
from sglang_cake.stores.base import Store, StoredNamespace
from sglang_cake.stores.circuit import one_line
from sglang_cake.stores.s3.bucket import Refused, S3Bucket, S3Place
from sglang_cake.stores.s3.s3_store import DESCRIPTION, S3Store
from sglang_cake.stores.timing import TimeoutLimits

PATIENCE = TimeoutLimits()
CHECK_S = 8.0  # how long a start may wait for an answer
MAX_DESCRIPTION_BYTES = 2**16
MAX_NAMESPACES = 10_000
# What waiting does not heal.
_MISTAKES = (
    ConfigParseError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    SSLError,
)
_NAMESPACE = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class S3Source:
    """Implements `StoreSource`."""

    place: S3Place

    def check(self) -> None:
        """Asks for one name. No answer within CHECK_S, or one of a broken server, is no refusal."""
        refused: list[ConfigError] = []

        def ask() -> None:
            try:
                asyncio.run(asyncio.wait_for(self._ask(), CHECK_S))
            except TimeoutError:
                pass
            except StoreError as error:
                if mistake := self._mistake(error):
                    refused.append(ConfigError(mistake))

        # A thread of its own, since the caller may have an event loop running.
        thread = threading.Thread(target=ask, name="cake-s3-check")
        thread.start()
        thread.join()
        if refused:
            raise refused[0]

    def open(self, frame: BlockFrame, *, depth: int) -> Store:
        """Connects with the first call. What a namespace stands for is not compared: every block
        says itself which one it belongs to."""
        return S3Store(self.place, frame, depth=depth, patience=PATIENCE)

    async def namespaces(self) -> list[StoredNamespace]:
        start = self.place.name("")
        bucket = S3Bucket(self.place, connections=1, patience=PATIENCE)
        try:
            digests: list[str] = []
            async for page in bucket.pages(start, delimiter="/"):
                names = (folder.removeprefix(start).rstrip("/") for folder in page.folders)
                digests += filter(_NAMESPACE.fullmatch, names)
                if len(digests) > MAX_NAMESPACES:
                    raise StoreUnavailable(f"S3: a listing of more than {MAX_NAMESPACES} folders")
            return [
                StoredNamespace(Digest(bytes.fromhex(name)), await self._fields(bucket, name))
                for name in digests
            ]
        finally:
            await bucket.close()

    async def _ask(self) -> None:
        bucket = S3Bucket(self.place, connections=1, patience=PATIENCE)
        try:
            await bucket.page(self.place.name(""), MaxKeys=1)
        finally:
            await bucket.close()

    def _mistake(self, error: StoreError) -> str:
        """Why the bucket cannot be used, now or later; empty if it might be."""
        where = self.place.endpoint or "the configured S3 service"
        which = f"bucket {self.place.bucket!r} at {where}"
        if isinstance(error, Refused):
            if error.elsewhere:
                return f"{which}: {error.elsewhere}"
            if error.code == "NoSuchBucket":
                return f"{which} does not exist: make it first"
            if error.status in (400, 401, 403):
                said = one_line(error.code)
                return f"{which}: {said}; check the credentials, their policy, and the region"
        if isinstance(error.__cause__, _MISTAKES):
            return f"{which}: {one_line(error.__cause__)}"
        return ""

    async def _fields(self, bucket: S3Bucket, name: str) -> dict[str, str]:
        try:
            raw = b""
            place = self.place.name(name, DESCRIPTION)
            async with bucket.reading(place, MAX_DESCRIPTION_BYTES) as body:
                while len(raw) <= MAX_DESCRIPTION_BYTES and (data := await body.read(2**14)):
                    raw += data
            fields = json.loads(raw[:MAX_DESCRIPTION_BYTES])
        except (StoreError, ValueError, RecursionError):
            return {}
        if not isinstance(fields, dict):
            return {}
        return {name: value for name, value in fields.items() if isinstance(value, str)}
