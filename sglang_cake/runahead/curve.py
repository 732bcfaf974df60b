"""Who may connect: CurveZMQ (rfc.zeromq.org/spec/26) with two key pairs that the secret yields.

A member that is dialed shows the group's server key, and one that dials shows its client key. Both
secret keys are derived from the group's secret, so only a member can make a connection, in either
role. Each connection is encrypted with keys of its own, which a recording and the secret do not
yield.

The port for KV has a password, which members hear on the connections above (`kv_path.py`).
"""

import hashlib
import logging

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

_MESSAGES = "messages"  # domains, as the authenticator calls it
_KV = "kv"
_USER = "member"


class Curve:
    """The group's keys. Args: secret: 32 bytes that all members know."""

    def __init__(self, secret: bytes) -> None:
        self._server_public, self._server_secret = _pair(secret, b"server")
        self._client_public, self._client_secret = _pair(secret, b"client")

    def admit(
        self, context: "zmq.Context[zmq.Socket[bytes]]", kv_password: str
    ) -> ThreadAuthenticator:
        """Have keys and passwords judged of those who connect. The caller stops it.

        Raises: RuntimeError if there can be no thread for it.
        """
        # Its log has passwords. This one leads nowhere.
        doorman = ThreadAuthenticator(context, log=logging.Logger("none", logging.CRITICAL))
        doorman.start()
        doorman.configure_curve_callback(_MESSAGES, credentials_provider=self)
        doorman.configure_plain(_KV, {_USER: kv_password})
        return doorman

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether that is a member's client key. As pyzmq's authenticator asks."""
        return key == self._client_public

    def serve(self, router: "zmq.Socket[bytes]") -> None:
        """Before `bind`."""
        router.curve_server = True
        router.curve_publickey = self._server_public
        router.curve_secretkey = self._server_secret
        _judged(router, _MESSAGES)

    def dial(self, dealer: "zmq.Socket[bytes]") -> None:
        """Before `connect`."""
        dealer.curve_serverkey = self._server_public
        dealer.curve_publickey = self._client_public
        dealer.curve_secretkey = self._client_secret


def serve_kv(router: "zmq.Socket[bytes]") -> None:
    """The port for KV, before `bind`."""
    router.plain_server = True
    _judged(router, _KV)


def dial_kv(dealer: "zmq.Socket[bytes]", password: str) -> None:
    """The same, before `connect`."""
    dealer.plain_username = _USER.encode()
    dealer.plain_password = password.encode()


def _judged(router: "zmq.Socket[bytes]", domain: str) -> None:
    router.zap_domain = domain.encode()
    router.zap_enforce_domain = True  # without somebody who judges, nobody may connect


def _pair(secret: bytes, role: bytes) -> tuple[bytes, bytes]:
    """Public and secret key, in Z85. `secret` is uniformly random, so that one hash derives."""
    key = hashlib.blake2b(key=secret, person=b"cake-ra " + role, digest_size=32).digest()
    secret_key = z85.encode(key)
    return zmq.curve_public(secret_key), secret_key
