"""Blocks that lie encrypted in another store: AES-256-GCM, with a key of the namespace's own."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sglang_cake.codecs.frame import (
    NONCE_BYTES,
    SEALED_BYTES,
    SEALED_FIELD,
    BlockFrame,
    sealed_frame,
    sealed_namespace,
)
from sglang_cake.core.buffers import TellBytes, on_page
from sglang_cake.core.errors import BlockCorrupt, ConfigError, StoreError
from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.core.namespace import Namespace
from sglang_cake.stores.base import Store, StoredNamespace, StoreSource
from sglang_cake.stores.key_file import read_key_file
from sglang_cake.stores.threads import check_stop, run_stoppable
from sglang_cake.stores.wrapper_store import WrapperStore

# One thread does some GB/s where the CPU has AES instructions; the second is for the writer, so
# that a read does not wait behind it.
THREADS = 2
MAX_BLOCK_BYTES = 2**31 - 1 - SEALED_BYTES  # what the library takes at once


class Sealer:
    """Seals and opens the blocks of one namespace. Thread-safe.

    A nonce is 96 random bits. Two blocks of a namespace that had the same one would betray each
    other; below 2^32 puts, that has a probability of less than 2^-32 (NIST SP 800-38D, 8.3).
    """

    def __init__(self, key: bytes, namespace: Digest) -> None:
        """Args: key: of this namespace alone."""
        self._cipher, self._namespace = AESGCM(key), namespace

    def seal(self, key: BlockKey, block: memoryview, sealed: memoryview) -> None:
        """Fill `sealed` ("B", SEALED_BYTES longer than `block`)."""
        nonce = os.urandom(NONCE_BYTES)
        sealed[:NONCE_BYTES] = nonce
        self._cipher.encrypt_into(nonce, block, self._namespace + key, sealed[NONCE_BYTES:])

    def open(self, key: BlockKey, sealed: memoryview, block: memoryview) -> None:
        """Fill `block` ("B") with what was sealed as the block of `key`.

        Raises: BlockCorrupt if `sealed` is anything else; `block` is then undefined.
        """
        nonce = sealed[:NONCE_BYTES]
        try:
            self._cipher.decrypt_into(nonce, sealed[NONCE_BYTES:], self._namespace + key, block)
        except InvalidTag:
            raise BlockCorrupt(f"{key.hex()} is not what was sealed with this key") from None


class EncryptedStore(WrapperStore):
    """Implements `Store`. Every call has a buffer of one sealed block, at most `depth` for reads
    and `depth` for writes; bytes are copied only by being encrypted and decrypted."""

    def __init__(self, inner: Store, sealer: Sealer, *, block_bytes: int, depth: int) -> None:
        """Args:
        inner: of blocks that are SEALED_BYTES longer; it is closed with this store.
        block_bytes: of a payload that is not sealed, at most.
        depth: reads, and writes, at once; more of them wait.
        """
        super().__init__(inner)
        self._sealer = sealer
        self._block_bytes = block_bytes
        self._reading, self._writing = asyncio.Semaphore(depth), asyncio.Semaphore(depth)
        self._idle: list[memoryview] = []
        self._threads = ThreadPoolExecutor(THREADS, "cake-seal")

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        """As in `Store`, without progress. A block that was forged is deleted: unlike one that was
        damaged, the inner store has no way to notice."""
        assert out.nbytes == self._block_bytes, out.nbytes
        async with self._buffer(self._reading) as sealed:
            size_bytes = await self._inner.get_into(key, sealed) - SEALED_BYTES
            try:
                if size_bytes < 0:
                    raise BlockCorrupt(f"{key.hex()} is shorter than any sealed block")
                view = out.cast("B")[:size_bytes]
                await self._in_thread(
                    self._sealer.open, key, sealed[: size_bytes + SEALED_BYTES], view
                )
                return size_bytes
            except BlockCorrupt:
                with contextlib.suppress(StoreError):  # it stays, and fails again
                    await self._inner.delete(key)
                raise

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        assert data.nbytes <= self._block_bytes, data.nbytes
        async with self._buffer(self._writing) as buffer:
            sealed = buffer[: data.nbytes + SEALED_BYTES]
            await self._in_thread(self._sealer.seal, key, data.cast("B"), sealed)
            return await self._inner.put(key, sealed)

    async def close(self) -> None:
        """Calls that have not reached the inner store fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._inner.close()
        await asyncio.to_thread(self._threads.shutdown)

    @asynccontextmanager
    async def _buffer(self, places: asyncio.Semaphore) -> AsyncIterator[memoryview]:
        async with places:
            buffer = self._idle.pop() if self._idle else on_page(self._block_bytes + SEALED_BYTES)
            try:
                yield buffer
            finally:
                self._idle.append(buffer)

    async def _in_thread(
        self,
        work: Callable[[BlockKey, memoryview, memoryview], None],
        key: BlockKey,
        source: memoryview,
        target: memoryview,
    ) -> None:
        # The cipher lets go of the GIL, but cannot be stopped half-way: a cancelled caller waits
        # for it, some milliseconds for a large block.
        def run(stop: threading.Event) -> None:
            check_stop(stop)
            work(key, source, target)

        await run_stoppable(self._threads, run)


@dataclass(frozen=True, slots=True)
class EncryptedSource:
    """Implements `StoreSource`: another source, whose blocks are sealed with the key of a file.

    It shows what was sealed with this key, and nothing else that may be stored there.
    """

    inner: StoreSource
    key_file: Path  # read when the store is checked and whenever a namespace is opened

    def check(self) -> None:
        read_key_file(self.key_file)
        self.inner.check()

    def open(self, frame: BlockFrame, *, depth: int) -> Store:
        if frame.payload_bytes > MAX_BLOCK_BYTES:
            raise ConfigError(f"blocks of {frame.payload_bytes} bytes are too large to be sealed")
        master = read_key_file(self.key_file)
        sealed = sealed_frame(frame, master.name)
        return EncryptedStore(
            self.inner.open(sealed, depth=depth),
            Sealer(master.block_key(sealed.digest), sealed.digest),
            block_bytes=frame.payload_bytes,
            depth=depth,
        )

    def stored_frame(self, frame: BlockFrame) -> BlockFrame:
        """How the blocks of `frame` lie in the inner store. Raises: ConfigError."""
        return sealed_frame(frame, read_key_file(self.key_file).name)

    async def namespaces(self) -> list[StoredNamespace]:
        """Those of this key, as they were before they were sealed. Raises: ConfigError."""
        name = read_key_file(self.key_file).name
        found = (_unsealed(stored, name) for stored in await self.inner.namespaces())
        return [stored for stored in found if stored is not None]


def _unsealed(stored: StoredNamespace, key_name: str) -> StoredNamespace | None:
    """What `EncryptedSource.open` needs to open `stored`; None if it cannot be opened."""
    plain = {name: value for name, value in stored.fields.items() if name != SEALED_FIELD}
    try:  # the description is anybody's: it may hold more than text
        namespace = Namespace(tuple(plain.items()))
        if sealed_namespace(namespace, key_name).digest() != stored.digest:
            return None
        return StoredNamespace(namespace.digest(), plain)
    except (AttributeError, UnicodeError):
        return None
