"""Environment variables that Kubernetes sets in a container for each Service of its namespace, such
as SGLANG_ROUTER_SERVICE_HOST for a Service `sglang-router`. They are no settings."""

import re
from collections.abc import Mapping

_NUMBERED = re.compile(r".+_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")
_SERVICE = re.compile(r"(.+_SERVICE)_(HOST|PORT(_.+)?)")
_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


def without_service_links(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are certainly none of a Service. A setting may have such a name: of a
    Service, both host and port are set, and the value of `<NAME>_PORT` is an address."""
    return {name: value for name, value in environ.items() if not _is_link(name, environ)}


def _is_link(name: str, environ: Mapping[str, str]) -> bool:
    if _NUMBERED.fullmatch(name):
        return True
    if name.endswith("_PORT") and _ADDRESS.match(environ[name]):
        return True
    found = _SERVICE.fullmatch(name)
    return found is not None and all(f"{found[1]}_{end}" in environ for end in ("HOST", "PORT"))
