"""An S3 server in a process of its own, for the tests of the S3 store."""

import dataclasses
import os
import secrets
import subprocess
import sys
from contextlib import contextmanager
from functools import cached_property
from http.client import HTTPConnection

import boto3
from polling import until

from sglang_cake.demo.sglang_server import free_port
from sglang_cake.stores.circuit_breaker import TimeoutLimits
from sglang_cake.stores.open_store import parse_sources
from sglang_cake.testing.store_contract import FRAME

# Of another S3 service of this machine, to run the tests against it (docs/object-stores.md).
OTHER_PORT = int(os.environ.get("CAKE_TEST_S3_PORT", "0"))
PATIENT = TimeoutLimits(first_s=60.0, floor_s=60.0)  # however busy the machine is


def patient(source):
    return dataclasses.replace(source, limits=PATIENT, check_s=60.0)


class Moto:
    """A server on loopback. Forgets everything when it is started again."""

    def __init__(self, port, **environment):
        self.port = port
        self.process = None
        self.endpoint = f"http://127.0.0.1:{port}"
        if OTHER_PORT:
            return
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        self.process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(self._answers, "the server answers")

    def _answers(self):
        assert self.process.poll() is None, "the server ended"
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/moto-api/")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    @cached_property
    def client(self):
        """Another implementation than the one under test, to look behind its back."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="anyone",
            aws_secret_access_key="anything",
        )

    def make_bucket(self, name=None):
        name = name or f"bucket-{secrets.token_hex(8)}"
        self.client.create_bucket(Bucket=name)
        return name

    def write(self, path, body):
        """Put an object; `path` starts with the bucket."""
        bucket, _, name = path.partition("/")
        self.client.put_object(Bucket=bucket, Key=name, Body=body)

    def read(self, path):
        bucket, _, name = path.partition("/")
        return self.client.get_object(Bucket=bucket, Key=name)["Body"].read()

    def url(self, place):
        return f"s3://{place}?endpoint={self.endpoint}&region=us-east-1"

    def source(self, place, options=""):
        """Its stores wait for long; tests of time limits set others."""
        (source,) = parse_sources(self.url(place) + options)
        if hasattr(source, "inner"):
            return dataclasses.replace(source, inner=patient(source.inner))
        return patient(source)

    def open(self, place, frame=FRAME, depth=4, options=""):
        return self.source(place, options).open(frame, depth=depth)

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@contextmanager
def moto(**environment):
    server = Moto(OTHER_PORT or free_port(), **environment)
    try:
        yield server
    finally:
        server.kill()
