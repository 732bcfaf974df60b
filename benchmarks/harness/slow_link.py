"""A TCP proxy with a limited bandwidth between a server and its store, which can break."""

import asyncio
import contextlib
import threading
import time

PIECE_BYTES = 8192


class SlowLink:
    """Forwards bytes over TCP, in its own thread. All connections share the bandwidth from the
    store; bytes to the store are not delayed.

    Clients connect to `port` on this machine.
    """

    def __init__(self, store: int, bytes_per_s: float) -> None:
        """Args: store: the port of the store, on this machine."""
        self._store = store
        self.bytes_per_s = bytes_per_s
        self._free_s = 0.0  # when all accepted bytes have crossed the link
        self._cut_bytes: int | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self.port = 0
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(60)

    def cut_after(self, count: int) -> None:
        """Break every connection, once, after `count` more bytes from the store."""
        self._loop.call_soon_threadsafe(setattr, self, "_cut_bytes", count)

    @property
    def is_cut(self) -> bool:
        """Whether the cut has happened."""
        return self._cut_bytes is None

    def close(self) -> None:
        """End every connection. Blocks until they have ended."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def _run(self, ready: threading.Event) -> None:
        self._loop.run_until_complete(self._listen())
        ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._server.close()
        self._loop.run_until_complete(asyncio.sleep(0.05))
        self._loop.close()

    async def _listen(self) -> None:
        """Listen on the former port, if there was one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            theirs, ours = await asyncio.open_connection("127.0.0.1", self._store)
            self._writers |= {writer, ours}
            try:
                await asyncio.gather(
                    self._copy(reader, ours, paced=False), self._copy(theirs, writer, paced=True)
                )
            finally:
                for each in (writer, ours):
                    self._writers.discard(each)
                    each.close()

    async def _copy(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, paced: bool
    ) -> None:
        while data := await source.read(PIECE_BYTES):
            if paced:
                await self._pass(len(data))
                self._count(len(data))
            target.write(data)
            await target.drain()
        if target.can_write_eof():
            target.write_eof()

    async def _pass(self, count: int) -> None:
        """Wait until so many bytes have crossed the link."""
        self._free_s = max(self._free_s, time.monotonic()) + count / self.bytes_per_s
        await asyncio.sleep(self._free_s - time.monotonic())

    def _count(self, count: int) -> None:
        if self._cut_bytes is None:
            return
        self._cut_bytes -= count
        if self._cut_bytes <= 0:
            self._cut_bytes = None
            for writer in self._writers:
                writer.transport.abort()
