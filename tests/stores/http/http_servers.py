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
import time
from pathlib import Path

import pytest

import sglang_cake
from sglang_cake.codecs.frame import HEADER_BYTES, BlockFrame
from sglang_cake.core.layout import BlockLayout
from sglang_cake.core.namespace import Namespace
from sglang_cake.stores.http.auth import load_tokens, make_own_token
from sglang_cake.stores.http.http_client import HttpStore
from sglang_cake.stores.http.http_transport import Endpoint
from sglang_cake.stores.http.protocol import block_path, description_path
from sglang_cake.stores.timing import TimeoutLimits
from sglang_cake.testing.server import free_port
from sglang_cake.testing.store_contract import FRAME, LAYOUT, block_of, key_of

A, B = key_of("a"), key_of("b")
FRAMED_BYTES = HEADER_BYTES + LAYOUT.block_bytes
TOKEN = "correct-horse-battery-staple"
OWN = object()  # the token of a server that was not given any
STARTED: list[subprocess.Popen] = []  # by now, in all tests
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


def with_client(base, test, **kwargs):
    async def main():
        store = opened(base, **kwargs)
        try:
            return await test(store)
        finally:
            await store.close()

    return asyncio.run(main())


def is_open(name):
    """Whether this process has such a file open."""
    names = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            names.append(os.readlink(fd))
    return any(name in path for path in names)


def poll(condition, what):
    """Wait until `condition()` is true."""
    until_s = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < until_s, f"{what}: not within {WAIT_S} s"
        time.sleep(0.01)
    return found


def write_token(folder, token=TOKEN):
    path = folder / "token"
    path.write_text(token + "\n")
    path.chmod(0o600)
    return path


def serve_command(root, *options):
    return [
        *(sys.executable, "-m", "sglang_cake", "store", "serve"),
        *("--root", str(root), "--min-free", "0", *map(str, options)),
    ]


def with_limits(command, limits):
    """The command with other limits, by names as `prefork.DEAD_LOOKS`."""
    modules = {name.partition(".")[0] for name in limits}
    lines = [f"from sglang_cake.stores.http import {module}" for module in sorted(modules)]
    lines += [f"{name} = {value}" for name, value in limits.items()]
    lines += ["import sys", "from sglang_cake.cli import main", "sys.exit(main(sys.argv[1:]))"]
    return [sys.executable, "-c", "\n".join(lines), *command[3:]]


def serve_environment():
    return os.environ | {"PYTHONPATH": str(Path(sglang_cake.__file__).parents[1])}


class OurServer:
    """`sglang-cake store serve` in a process of its own."""

    def __init__(self, root, *options, port=0, limits=None):
        command = serve_command(root, "--port", port, *options)
        self.process = subprocess.Popen(
            with_limits(command, limits) if limits else command,
            env=serve_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        STARTED.append(self.process)
        line = self.process.stdout.readline()
        assert " is served at " in line, f"{line!r}, exit status {self.process.poll()}"
        self.base = line.split()[-1]
        self.port = int(self.base.rsplit(":", 1)[1])

    def stop(self):
        """End it as an operator would; the exit status."""
        self.process.terminate()
        return self.ended()

    def workers(self):
        """The processes that answer."""
        pid = self.process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def kill(self):
        """All of it, as a power cut would."""
        workers = self.workers()
        self.process.kill()
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        poll(lambda: not any(map(is_alive, workers)), "all of it is gone")
        return self.ended()

    def ended(self):
        status = self.process.wait(WAIT_S)
        self.process.stdout.close()
        return status


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
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
    client_max_body_size 64m;
    server {{
        listen 127.0.0.1:{port};
        root {root};
        location / {{ dav_methods PUT DELETE; create_full_put_path on; }}
        {more}
    }}
}}
"""


class Nginx:
    """nginx with WebDAV over a folder; and, at /kv/, before another server if there is one."""

    def __init__(self, folder, root, before=None):
        program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
        if program is None:
            pytest.skip("nginx is not installed: apt-get install nginx-light")
        root.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        config = folder / "nginx.conf"
        more = f"location /kv/ {{ proxy_pass {before}/; }}" if before else ""
        config.write_text(NGINX.format(folder=folder, root=root, port=self.port, more=more))
        self.process = subprocess.Popen([program, "-p", str(folder), "-c", str(config)])
        STARTED.append(self.process)
        poll(lambda: connects(self.port), "nginx listens")

    def stop(self):
        self.process.terminate()
        self.process.wait(WAIT_S)


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
BIG_LAYOUT = BlockLayout(
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


def claim(server, frame=FRAME, token=OWN):
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
