"""`s3://bucket/prefix?endpoint=http://host:9000&region=eu-central-1`: blocks in a bucket."""

import re
from urllib.parse import unquote, urlsplit

from sglang_cake.core.errors import ConfigError
from sglang_cake.stores.base import StoreSource
from sglang_cake.stores.sources import missing_extra
from sglang_cake.stores.url import StoreUrl, matching

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_REGION = re.compile(r"[a-z0-9-]{1,40}")
_read_region = matching(_REGION, "not a region: write for example eu-central-1")
MAX_PREFIX_BYTES = 512  # a name may have 1024, and ours needs 136 of them


def parse(url: StoreUrl) -> StoreSource:
    """Raises: ConfigError; also if aiobotocore is not installed."""
    bucket, _, prefix = url.place.partition("/")
    if "@" in bucket:
        raise url.error(
            "credentials do not belong there: name them in the environment or in ~/.aws, "
            "or use an instance role"
        )
    if not _BUCKET.fullmatch(bucket):
        raise url.error(f"{bucket!r} is not a bucket, write s3://bucket/prefix")
    endpoint = url.option("endpoint", _endpoint, "") or None
    region = url.option("region", _read_region, "") or None
    try:
        from sglang_cake.stores.s3.bucket import S3Place
        from sglang_cake.stores.s3.s3_source import S3Source
    except ImportError:
        raise missing_extra(url, "aiobotocore", "s3") from None
    return S3Source(S3Place(bucket, _prefix(url, prefix), endpoint, region))


def _prefix(url: StoreUrl, text: str) -> str:
    prefix = unquote(text).strip("/")
    if (
        "" in prefix.split("/")[1:]
        or not prefix.isprintable()
        or {".", ".."} & {*prefix.split("/")}
    ):
        raise url.error("the prefix is made of names with single slashes between them")
    if len(prefix.encode()) > MAX_PREFIX_BYTES:
        raise url.error(f"the prefix is longer than {MAX_PREFIX_BYTES} bytes")
    return prefix


def _endpoint(text: str) -> str:
    try:
        parts = urlsplit(text)
        good = parts.port != 0  # raises for what is not a port
    except ValueError:
        good = False
    if not good or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{text!r} is not an endpoint: write for example http://10.0.0.7:9000")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError("an endpoint is only http(s)://host:port, without credentials")
    return text
