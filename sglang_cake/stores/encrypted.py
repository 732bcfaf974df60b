"""Encryption of blocks in front of another store: AES-256-GCM, with one key per namespace."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sglang_cake.codecs.frame import (
    NONCE_BYTES,
    SEALED_BYTES,
    SEALED_FIELD,
    BlockFrame,
    sealed_frame,
    sealed_namespace,
)
from sglang_cake.core.buffers import TellBytes, on_page
from sglang_cake.core.errors import BlockCorrupt, ConfigError
from sglang_cake.core.keys import BlockKey, Digest, Namespace, digest_of
from sglang_cake.core.secret_file import read_key
from sglang_cake.core.threads import DaemonPool, check_stop, run_in_own_thread, run_stoppable
from sglang_cake.stores.base import (
    Store,
    StoredNamespace,
    StoreLayer,
    StoreSource,
    WrapperStore,
    depth_of,
    describe,
)
from sglang_cake.stores.corrupt_reports import CorruptReports

# One thread encrypts some GB/s where the CPU has AES instructions. The second thread is for the
# writer, so that a read does not wait for a write.
THREADS = 2
KEY_BYTES = 32
MAX_BLOCK_BYTES = 2**31 - 1 - SEALED_BYTES  # limit of the library for one call
_MAKE_ONE = "make one by: (umask 077; openssl rand -hex 32 > FILE)"


@dataclass(frozen=True, slots=True)
class MasterKey:
    """Key of a store. It encrypts nothing itself: a key is derived from it for each namespace.

    So blocks of different namespaces never share a key and a nonce.
    """

    secret: bytes = field(repr=False)  # KEY_BYTES

    @property
    def name(self) -> str:
        """16 hex digits that identify the key and do not reveal it."""
        return self._derived(b"name", 8).hex()

    def block_key(self, namespace: Digest) -> bytes:
        """Key of one namespace, KEY_BYTES long."""
        return self._derived(b"blocks" + namespace, KEY_BYTES)

    def _derived(self, purpose: bytes, length: int) -> bytes:
        info = b"sglang_cake seal v1 " + purpose
        return HKDF(algorithm=SHA256(), length=length, salt=None, info=info).derive(self.secret)


def read_key_file(path: Path) -> MasterKey:
    """Read 64 hex digits from a file that only its owner may read or write.

    Raises: ConfigError, one line that says what to do and does not quote the file.
    """
    return MasterKey(read_key(path, name="key file", hint=_MAKE_ONE))


class BlockCipher:
    """Encrypts and decrypts the blocks of one namespace. Thread-safe.

    A nonce is 96 random bits. Two blocks of a namespace with the same nonce would reveal their
    difference. Below 2^32 puts the probability of that is less than 2^-32 (NIST SP 800-38D, 8.3).
    """

    def __init__(self, key: bytes, namespace: Digest) -> None:
        """Args:
        key: used for this namespace only, KEY_BYTES long.
        """
        self._cipher = AESGCM(key)
        self._namespace = namespace

    def encrypt(self, key: BlockKey, block: memoryview, encrypted: memoryview) -> None:
        """Fill `encrypted` ("B", SEALED_BYTES longer than `block`)."""
        nonce = os.urandom(NONCE_BYTES)
        encrypted[:NONCE_BYTES] = nonce
        self._cipher.encrypt_into(nonce, block, self._namespace + key, encrypted[NONCE_BYTES:])

    def decrypt(self, key: BlockKey, encrypted: memoryview, block: memoryview) -> None:
        """Fill `block` ("B") with the block of `key`.

        Raises: BlockCorrupt if `encrypted` was not made by `encrypt` with this key and this block
            key; `block` is then undefined.
        """
        nonce = encrypted[:NONCE_BYTES]
        try:
            self._cipher.decrypt_into(nonce, encrypted[NONCE_BYTES:], self._namespace + key, block)
        except InvalidTag:
            raise BlockCorrupt(f"{key.hex()} was not encrypted with this key") from None


class EncryptedStore(WrapperStore):
    """Implements `Store`. A read or write uses a buffer of one encrypted block.

    Encryption and decryption are the only copies.
    """

    def __init__(self, inner: Store, cipher: BlockCipher, *, block_bytes: int, depth: int) -> None:
        """Args:
        inner: holds blocks that are SEALED_BYTES longer; closed with this store.
        block_bytes: limit for a payload before encryption.
        depth: concurrent reads, and concurrent writes; further ones wait.
        """
        super().__init__(inner)
        self._cipher = cipher
        self._block_bytes = block_bytes
        self._reading = asyncio.Semaphore(depth)
        self._writing = asyncio.Semaphore(depth)
        self._idle: list[memoryview] = []
        self._reports = CorruptReports(inner.delete)
        self._threads = DaemonPool(THREADS, "cake-seal")

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        """As in `Store`, without progress.

        A forged block is deleted in the background, since the inner store cannot detect it as it
        does a damaged one.
        """
        assert out.nbytes == self._block_bytes, out.nbytes
        async with self._buffer(self._reading) as buffer:
            size_bytes = await self.inner.get_into(key, buffer) - SEALED_BYTES
            try:
                if size_bytes < 0:
                    raise BlockCorrupt(f"{key.hex()} is shorter than any encrypted block")
                encrypted = buffer[: size_bytes + SEALED_BYTES]
                view = out.cast("B")[:size_bytes]
                await self._in_thread(self._cipher.decrypt, key, encrypted, view)
                return size_bytes
            except BlockCorrupt:
                self._reports.begin(key)
                raise

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        assert data.nbytes <= self._block_bytes, data.nbytes
        await self._reports.end(key)
        async with self._buffer(self._writing) as buffer:
            encrypted = buffer[: data.nbytes + SEALED_BYTES]
            await self._in_thread(self._cipher.encrypt, key, data.cast("B"), encrypted)
            return await self.inner.put(key, encrypted)

    async def close(self) -> None:
        """Calls that have not reached the inner store fail."""
        await self._reports.end_all()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self.inner.close()
        await run_in_own_thread(self._threads.shutdown)

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
        out: memoryview,
    ) -> None:
        # The cipher releases the GIL and cannot be interrupted. A cancelled caller waits for it,
        # some milliseconds for a large block.
        def run(stop: threading.Event) -> None:
            check_stop(stop)
            work(key, source, out)

        await run_stoppable(self._threads, run)


@dataclass(frozen=True, slots=True)
class EncryptedSource:
    """Implements `StoreSource`: another source, whose blocks are encrypted with the key of a file.

    Other blocks in that store are not visible.
    """

    inner: StoreSource
    key_file: Path  # read by every method

    @property
    def depth(self) -> int:
        return depth_of(self.inner)

    def check(self) -> None:
        read_key_file(self.key_file)
        self.inner.check()

    def open(self, frame: BlockFrame, *, depth: int) -> Store:
        if frame.payload_bytes > MAX_BLOCK_BYTES:
            raise ConfigError(f"blocks of {frame.payload_bytes} bytes are too large to encrypt")
        master = read_key_file(self.key_file)
        stored = sealed_frame(frame, master.name)
        return EncryptedStore(
            self.inner.open(stored, depth=depth),
            BlockCipher(master.block_key(stored.digest), stored.digest),
            block_bytes=frame.payload_bytes,
            depth=depth,
        )

    def stored_frame(self, frame: BlockFrame) -> BlockFrame:
        """Frame of the encrypted blocks in the inner store. Raises: ConfigError."""
        return sealed_frame(frame, read_key_file(self.key_file).name)

    async def namespaces(self) -> list[StoredNamespace]:
        """Namespaces that this key encrypted, as they are named outside, and damaged ones, which
        may be of this key. Raises: ConfigError."""
        name = read_key_file(self.key_file).name
        found = (_plain(stored, name) for stored in await self.inner.namespaces())
        return [stored for stored in found if stored is not None]

    def describe(self) -> StoreLayer:
        return StoreLayer("EncryptedStore", {"key_file": self.key_file}, (describe(self.inner),))


def _plain(stored: StoredNamespace, key_name: str) -> StoredNamespace | None:
    """The namespace that `EncryptedSource.open` opens as `stored`, without fields if `stored` is
    damaged; None if it is plain, or of another key."""
    plain = {name: value for name, value in stored.fields.items() if name != SEALED_FIELD}
    try:  # the description is untrusted: it may hold more than text
        namespace = Namespace(tuple(plain.items()))
        if sealed_namespace(namespace, key_name).digest() == stored.digest:
            return StoredNamespace(namespace.digest(), plain)
        if digest_of(stored.fields) == stored.digest:
            return None
    except AttributeError:
        pass
    return StoredNamespace(stored.digest, {})
