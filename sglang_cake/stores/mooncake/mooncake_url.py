"""`mooncake://host:50051?segment=4GB&protocol=tcp`: blocks in the memory of many machines."""

import re

from sglang_cake.core.errors import ConfigError
from sglang_cake.stores.base import StoreSource
from sglang_cake.stores.sources import missing_extra
from sglang_cake.stores.url import StoreUrl, matching, one_of, parse_size

DEFAULT_SEGMENT_BYTES = 4 * 10**9
MIN_SEGMENT_BYTES = 2**24  # the library refuses less
_MASTER = re.compile(r"([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\]):([0-9]{1,5})")
_METADATA = re.compile(r"P2PHANDSHAKE|(https?|etcd|redis)://[^\s@]+")
_DEVICES = re.compile(r"[\w.-]+(,[\w.-]+)*")
_HOSTNAME = re.compile(r"[A-Za-z0-9.:\[\]-]+")


def parse(url: StoreUrl) -> StoreSource:
    """Raises: ConfigError; also if Mooncake, or a library that it needs, is not installed."""
    master = _MASTER.fullmatch(url.place)
    if not master or not 0 < int(master[2]) < 2**16:
        raise url.error(f"{url.place!r} is not a master, write mooncake://host:50051")
    segment_bytes = url.option("segment", _segment, DEFAULT_SEGMENT_BYTES)
    metadata = url.option("metadata", matching(_METADATA, "not possible"), "P2PHANDSHAKE")
    protocol = url.option("protocol", one_of("tcp", "rdma"), "tcp")
    device = url.option("device", matching(_DEVICES, "not possible"), "")
    local_hostname = url.option("local_hostname", matching(_HOSTNAME, "not possible"), "") or None
    try:
        from sglang_cake.stores.mooncake.mooncake_engine import MooncakePlace
        from sglang_cake.stores.mooncake.mooncake_source import MooncakeSource
    except ModuleNotFoundError:
        raise missing_extra(url, "mooncake-transfer-engine", "mooncake") from None
    except ImportError as error:
        raise url.error(
            f"Mooncake cannot be loaded ({error}); on Debian or Ubuntu: "
            "apt-get install libibverbs1 libnuma1"
        ) from None
    return MooncakeSource(
        MooncakePlace(
            host=master[1].strip("[]"),
            port=int(master[2]),
            segment_bytes=segment_bytes,
            metadata=metadata,
            protocol=protocol,
            device=device,
            local_hostname=local_hostname,
        )
    )


def _segment(text: str) -> int:
    size_bytes = parse_size(text)
    if 0 < size_bytes < MIN_SEGMENT_BYTES:
        raise ConfigError(f"{text!r} is too little: lend at least 16MiB, or 0 for nothing")
    return size_bytes
