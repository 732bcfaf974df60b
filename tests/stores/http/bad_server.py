"""A server that does what a test tells it to, byte by byte. Not a real one: those never would."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Asked:
    """One request, and the way to answer it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    client_gone: asyncio.Event

    def send(self, data):
        self.writer.write(data)

    def answer(self, status, body=b"", *, length=None, headers=""):
        """A whole answer; `length` is what it claims to have."""
        length = len(body) if length is None else length
        head = f"HTTP/1.1 {status} x\r\nContent-Length: {length}\r\n{headers}\r\n"
        self.send(head.encode() + body)

    def end(self):
        """Close the connection in good order."""
        self.writer.close()

    def reset(self):
        """Drop it."""
        self.writer.transport.abort()


@dataclass
class BadServer:
    base: str
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    unasked: bytes = b""  # came after a request, and are no request


@asynccontextmanager
async def bad_server(answer):
    """Args: answer(asked): called for each request; what it does not send is never sent."""
    tasks = set()

    async def serve(reader, writer):
        server.connections += 1
        tasks.add(asyncio.current_task())
        gone = asyncio.Event()
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                line, *fields = head.strip().split("\r\n")
                headers = {k.lower(): v for k, v in (f.split(": ", 1) for f in fields)}
                method, path, _ = line.split(" ")
                body = b""
                if "expect" not in headers:
                    body = await reader.readexactly(int(headers.get("content-length", 0)))
                asked = Asked(method, path, headers, body, writer, gone)
                server.asked.append(asked)
                await answer(asked)
        except asyncio.IncompleteReadError as error:
            server.unasked += error.partial
        except (ConnectionError, asyncio.CancelledError):
            pass  # a task that ends as cancelled would be logged
        finally:
            gone.set()
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    server = BadServer(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    try:
        yield server
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
