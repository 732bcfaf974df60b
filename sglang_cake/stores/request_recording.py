"""Records the blocks of prompts, for `sglang-cake trace replay`, without tokens or keys."""

import errno
import hashlib
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.base import RequestFacts

logger = logging.getLogger(__name__)
MOST_REQUESTS = 4096  # requests whose later lookups are recognised
MOST_BYTES = 1 << 30  # of the file; about 20 bytes per block of a request


class RequestTraceFile:
    """A file to which one JSON line per request is appended.

    The number of a block is a hash of its key with a random salt, which is never written. So the
    numbers do not reveal prompts, not even known ones, and have no meaning after a restart.
    Several processes may append to it. A line that a full disk or the end of a process broke off
    stays, and the next one begins after it.
    """

    def __init__(
        self,
        path: Path,
        block_tokens: int,
        *,
        most_bytes: int = MOST_BYTES,
        most_requests: int = MOST_REQUESTS,
    ) -> None:
        """Mode 0600.

        Args:
            most_bytes: of the file; nothing is appended beyond.
            most_requests: whose later lookups are recognised.

        Raises: OSError.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._has_ended = False
        self._salt = os.urandom(32)
        self._block_tokens = block_tokens
        self._most_bytes = most_bytes
        self._most_requests = most_requests
        self._written: OrderedDict[str, None] = OrderedDict()

    def write(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        """Append a line for a request, whose prompt begins with the blocks `keys`. Later lookups of
        a request are ignored. After an error, which the log has, nothing more is appended."""
        if not keys or self._has_ended or facts.id in self._written:
            return
        self._written[facts.id] = None
        if len(self._written) > self._most_requests:
            self._written.popitem(last=False)
        line = {
            "t_s": time.time(),
            "block_tokens": self._block_tokens,
            "input_length": facts.tokens,
            "workload": facts.workload,
            "hash_ids": [self._name(key) for key in keys],
        }
        text = json.dumps(line).encode() + b"\n"
        try:
            size_bytes = os.fstat(self._fd).st_size
            if size_bytes and os.pread(self._fd, 1, size_bytes - 1) != b"\n":
                text = b"\n" + text  # the last line is broken off
            if size_bytes + len(text) > self._most_bytes:
                self._has_ended = True
                logger.warning("the recorded trace has %d bytes, and ends here", self._most_bytes)
                return
            # One call, since other processes write lines, too.
            if os.write(self._fd, text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._has_ended = True  # the last line may be a part of one
            logger.error("the recorded trace cannot be written, and ends here: %s", error)

    def _name(self, key: BlockKey) -> int:
        return int.from_bytes(hashlib.blake2b(key, digest_size=8, key=self._salt).digest()) >> 1

    def close(self) -> None:
        os.close(self._fd)
