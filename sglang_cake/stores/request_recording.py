"""Records which blocks requests access, for `sglang-cake trace replay`, without tokens or keys."""

import hashlib
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.base import LentBlock, RequestFacts, Store, WrapperStore

logger = logging.getLogger(__name__)
MOST_REQUESTS = 4096  # requests whose later reports are recognised
MOST_BYTES = 1 << 30  # of the file; about 20 bytes per block of a request


class RequestTraceFile:
    """A file to which one JSON line per request is appended.

    The number of a block is a hash of its key with a random salt, which is never written. So the
    numbers do not reveal prompts, not even known ones, and have no meaning after a restart.
    Nothing is appended beyond MOST_BYTES.
    """

    def __init__(self, path: Path, block_tokens: int) -> None:
        """Mode 0600. Raises: OSError."""
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(fd, "a", buffering=1, encoding="ascii")
        self._left_bytes = MOST_BYTES - os.fstat(fd).st_size
        self._salt = os.urandom(32)
        self._block_tokens = block_tokens
        self._written: OrderedDict[str, None] = OrderedDict()

    def write(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        """Append the first report of a request. Later ones are ignored. Raises: OSError."""
        if facts.id in self._written or not keys or self._left_bytes <= 0:
            return
        self._written[facts.id] = None
        if len(self._written) > MOST_REQUESTS:
            self._written.popitem(last=False)
        line = {
            "t_s": time.time(),
            "block_tokens": self._block_tokens,
            "input_length": facts.tokens,
            "workload": facts.workload,
            "hash_ids": [self._name(key) for key in keys],
        }
        text = json.dumps(line) + "\n"
        self._left_bytes -= len(text)
        if self._left_bytes > 0:
            self._file.write(text)
        else:
            logger.warning("the recorded trace has %d bytes, and ends here", MOST_BYTES)

    def _name(self, key: BlockKey) -> int:
        return int.from_bytes(hashlib.blake2b(key, digest_size=8, key=self._salt).digest()) >> 1

    def close(self) -> None:
        self._file.close()


class RequestRecordingStore(WrapperStore):
    """Records the accesses to another store."""

    def __init__(self, inner: Store, trace: RequestTraceFile) -> None:
        """Args: trace: stays open when this store is closed."""
        super().__init__(inner)
        self._trace = trace

    async def on_access(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        try:
            self._trace.write(keys, facts)
        except OSError as error:
            raise StoreUnavailable(f"the trace cannot be written: {error}") from error
        await super().on_access(keys, facts)

    def lend(self, key: BlockKey) -> LentBlock | None:
        return self.inner.lend(key)

    async def put_first(self, key: BlockKey, data: memoryview) -> bool:
        return await self.inner.put_first(key, data)
