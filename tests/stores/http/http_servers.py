"""Real servers for the tests of the HTTP store: ours and nginx, each as its own process."""

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import serve_process
from filestore import closing
from polling import until
from private_files import write_private

from sglang_cake.codecs.frame import HEADER_BYTES, BlockFrame
from sglang_cake.core.keys import Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.demo.sglang_server import free_port
from sglang_cake.stores.circuit_breaker import TimeoutLimits
from sglang_cake.stores.file.block_files import FolderSettings
from sglang_cake.stores.file.block_folder import BlockFolder
from sglang_cake.stores.file.file_store import FileSource
from sglang_cake.stores.http.auth import ServerCredentials, load_tokens, make_own_token
from sglang_cake.stores.http.http_server import StoreServer
from sglang_cake.stores.http.http_store import HttpStore
from sglang_cake.stores.http.http_transport import Endpoint
from sglang_cake.stores.http.protocol import block_path, description_path
from sglang_cake.stores.http.server_metrics import ServerMetrics
from sglang_cake.testing.store_contract import FRAME, LAYOUT, block_of, key_of

A, B = key_of("a"), key_of("b")
FRAMED_BYTES = HEADER_BYTES + LAYOUT.block_bytes
TOKEN = "correct-horse-battery-staple"
OWN = object()  # the token of a server that was not given any
STARTED = []  # servers that are processes of their own, so far
WAIT_S = 60.0  # for what takes a fraction of a second; generous, for machines that are busy


def framed(name, *, key=None, frame=FRAME):
    """The bytes of a stored block."""
    data = block_of(name, frame.layout)
    return bytes(frame.header(key or key_of(name), data)) + bytes(data)


def own_token():
    return load_tokens(make_own_token())[0]


def opened(base, *, depth=2, first_s=WAIT_S, floor_s=WAIT_S, token=OWN, frame=FRAME, **given):
    """A client. Its time limits are out of the way unless the test is about them."""
    limits = TimeoutLimits(first_s=first_s, floor_s=floor_s)
    endpoint = Endpoint(base, own_token() if token is OWN else token)
    return HttpStore(lambda: endpoint, frame, depth=depth, limits=limits, **given)


def opened_client(base, **kwargs):
    """A client that is closed at the end."""
    return closing(opened(base, **kwargs))


def is_open(name):
    """Whether this process has such a file open."""
    names = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            names.append(os.readlink(fd))
    return any(name in path for path in names)


def write_token(folder, token=TOKEN):
    return write_private(folder / "token", token + "\n")


def serve_options(root, *options):
    return ["--root", str(root), "--min-free", "0", *map(str, options)]


class OurServer:
    """`sglang-cake store serve` in a process of its own, which prints to `prints`.

    It has a port that no connection gets meanwhile, so another one can take it over.
    With `limits`, further fields of `ServeSettings`, it has no other options. A context ends it
    with exit status 0.
    """

    def __init__(self, root, *options, port=None, limits=None):
        options = serve_options(root, "--port", port or free_port(), *options)
        # Not `capfd`: its `readouterr` loses lines that a process writes meanwhile.
        self._errors_fd = os.memfd_create("errors")
        self.process, self.prints = serve_process.start(root, options, limits, self._errors_fd)
        STARTED.append(self)
        line = self.prints.readline()
        assert " is served at " in line, f"{line!r}, exit status {self.process.exitcode}"
        self.base = line.split()[-1]
        self.port = int(self.base.rsplit(":", 1)[1])

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        status = self.stop()
        assert kind is not None or status == 0, status

    def stop(self):
        """End it as an operator would; the exit status."""
        self.process.terminate()
        return self.ended()

    def stderr(self):
        """What it has written to its standard error."""
        return os.pread(self._errors_fd, os.fstat(self._errors_fd).st_size, 0).decode()

    def workers(self):
        """The processes that answer."""
        pid = self.process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def kill(self):
        """All of it, as a power cut would."""
        os.kill(self.process.pid, signal.SIGSTOP)  # it replaces no worker, and none sees its end
        workers = self.workers()
        for pid in (*workers, self.process.pid):
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(is_alive, workers)), "all of it is gone")
        return self.ended()

    def ended(self):
        self.process.join(WAIT_S)
        assert self.process.exitcode is not None, "it does not end"
        self.prints.close()
        return self.process.exitcode

    def discard(self):
        self.process.kill()
        self.process.join()
        self.prints.close()
        sys.stderr.write(self.stderr())
        os.close(self._errors_fd)


class ServerInProcess:
    """A server in a thread of this process, with its own limits and one event loop."""

    def __init__(
        self,
        root,
        *,
        stuck_s=WAIT_S,
        keepalive_s=WAIT_S,
        tls=None,
        most_connections=100,
        make_folder=BlockFolder,
        clock=time.monotonic,
    ):
        self._root = root
        self._make_folder = make_folder
        self._clock = clock
        self._stuck_s = stuck_s
        self._keepalive_s = keepalive_s
        self._tls = tls
        self._most_connections = most_connections
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._listening = socket.create_server(("127.0.0.1", 0))
        # As in `serving`: inherited by every connection.
        self._listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * stuck_s))
        self.port = self._listening.getsockname()[1]

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """Blocks until the server has ended. Does nothing once it has."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    async def _serve(self):
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        folder = self._make_folder(FolderSettings(self._root), self._clock)
        self._metrics = ServerMetrics()
        credentials = ServerCredentials(make_own_token(), tls_files=self._tls)
        server = StoreServer(
            folder,
            credentials,
            self._metrics,
            most_connections=self._most_connections,
            stuck_s=self._stuck_s,
            keepalive_s=self._keepalive_s,
        )
        listening = await self._loop.create_server(
            server, sock=self._listening, ssl=credentials.tls
        )
        self._ready.set()
        await self._stop.wait()
        listening.close()
        await server.shutdown(1.0)
        server.close()
        folder.close()

    def metrics(self):
        return parse_metrics(self._metrics.text({}).decode())

    def connect(self, receive_bytes=None):
        """A connection, with a receive buffer of so many bytes."""
        connection = socket.socket()
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(WAIT_S)
        connection.connect(("127.0.0.1", self.port))
        return connection


def fill_root(root, frame):
    """Store block A in a folder."""

    async def fill():
        store = FileSource(root, min_free_bytes=0).open(frame, depth=1)
        await store.put(A, block_of("a", frame.layout))
        await store.close()

    asyncio.run(fill())


def parse_metrics(text):
    """Metrics by name and labels, without the prefix."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name.removeprefix("sglang_cake_store_")] = float(value)
    return found


def metrics(server):
    return parse_metrics(ask(server, "GET", "/metrics")[2].decode())


def is_alive(pid):
    """Also while a killed process has a thread, which holds its files and locks."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" or len(list(Path(f"/proc/{pid}/task").iterdir())) > 1
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between open and read
        return False


NGINX = """
daemon off; master_process off; worker_processes 1; user root;
pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
    access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {servers}
}}
"""
NGINX_SERVER = """
    server {{
        listen 127.0.0.1:{port};
        client_max_body_size 64m;
        root {root};
        location / {{ dav_methods PUT DELETE; create_full_put_path on; }}
        {more}
    }}
"""


class Nginx:
    """nginx with WebDAV over a folder; and, at /kv/, before another server if there is one. Or with
    the configuration `servers(port)`."""

    def __init__(self, folder, root, before=None, servers=None):
        program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
        if program is None:
            pytest.skip("nginx is not installed: apt-get install nginx-light")
        root.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        config = folder / "nginx.conf"
        more = f"location /kv/ {{ proxy_pass {before}/; }}" if before else ""
        own = NGINX_SERVER.format(root=root, port=self.port, more=more)
        text = servers(self.port) if servers else own
        config.write_text(NGINX.format(folder=folder, servers=text))
        self.process = subprocess.Popen([program, "-p", str(folder), "-c", str(config)])
        STARTED.append(self)
        until(lambda: connects(self.port), "nginx listens")

    def stop(self):
        self.process.terminate()
        self.process.wait(WAIT_S)

    def discard(self):
        self.process.kill()
        self.process.wait()


def connects(port):
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def make_certificate(folder):
    """A self-signed certificate for 127.0.0.1; it is its own CA."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: apt-get install openssl")
    command = [
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
        *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-keyout", str(key), "-out", str(cert)),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


# Large enough to be on its way for a while: 8 MiB.
BIG_LAYOUT = BlockLayout.plain(
    layers=4, parts=(("k", (8, 128)), ("v", (8, 128))), dtype="bfloat16", block_tokens=512
)
BIG_FRAME = BlockFrame(Namespace((("model", "big"), ("layout", BIG_LAYOUT.describe()))), BIG_LAYOUT)


def ask(server, method, path, body=None, headers=None, token=OWN):
    """One plain request: status, headers in lower case, body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    headers = dict(headers or {})
    if token is not None:
        token = own_token() if token is OWN else token
        headers["Authorization"] = f"Bearer {token}"
    try:
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return response.status, found, response.read()
    finally:
        connection.close()


def put_description(server, frame=FRAME, token=OWN):
    """Tell the server what the namespace is."""
    body = json.dumps(frame.namespace.describe())
    path = description_path(frame.digest)
    assert ask(server, "PUT", path, body, token=token)[0] == 204


def put_block(server, name, frame=FRAME):
    body = framed(name, frame=frame)
    status, _, said = ask(server, "PUT", block_path(frame.digest, key_of(name)), body)
    assert status in (201, 204), said
    return status


def start_request(server, head, body=b""):
    """Send the beginning of a request; the connection."""
    connection = socket.create_connection(("127.0.0.1", server.port), WAIT_S)
    head += f"Authorization: Bearer {own_token()}\n"
    connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n" + body)
    return connection


def request_bytes(path, *fields):
    """A GET with the token."""
    lines = [f"GET {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {own_token()}", *fields]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1")


def start_put(server, name, frame, sent_bytes):
    """Send the head of a PUT and `sent_bytes` of its body; the connection and the rest."""
    body = framed(name, frame=frame)
    path = block_path(frame.digest, key_of(name))
    head = f"PUT {path} HTTP/1.1\nHost: x\nContent-Length: {len(body)}\n"
    return start_request(server, head, body[:sent_bytes]), body[sent_bytes:]


def read_status(connection):
    """The status of the answer that comes next."""
    head = b""
    while b"\r\n" not in head:
        piece = connection.recv(4096)
        assert piece, f"closed after {head!r}"
        head += piece
    return int(head.split()[1])
