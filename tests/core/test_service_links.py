"""The variables that Kubernetes sets for the Services of a namespace."""

import pytest

from sglang_cake.config import CakeConfig, resolve
from sglang_cake.core.service_links import without_service_links


def links(service: str, address: str = "10.96.3.4") -> dict[str, str]:
    """As Kubernetes sets them for a Service with one port, named http."""
    return {
        f"{service}_SERVICE_HOST": address,
        f"{service}_SERVICE_PORT": "8000",
        f"{service}_SERVICE_PORT_HTTP": "8000",
        f"{service}_PORT": f"tcp://{address}:8000",
        f"{service}_PORT_8000_TCP": f"tcp://{address}:8000",
        f"{service}_PORT_8000_TCP_PROTO": "tcp",
        f"{service}_PORT_8000_TCP_PORT": "8000",
        f"{service}_PORT_8000_TCP_ADDR": address,
    }


@pytest.mark.parametrize("service", ["SGLANG_ROUTER", "SGLANG_SERVICE", "SGLANG_SERVICE_PORT"])
def test_service_links_of_a_service_are_left_out(service: str) -> None:
    own = {"SGLANG_MODEL": "m", "SGLANG_PORT_OFFSET": "1"}
    assert without_service_links(own | links(service)) == own


@pytest.mark.parametrize(
    "environ",
    [
        {"SGLANG_ROUTER_PORT": "8000"},
        {"SGLANG_ROUTER_SERVICE_HOST": "10.96.3.4"},
        {"SGLANG_ROUTER_SERVICE_PORT": "8000"},
        {"SGLANG_ROUTER_SERVICE_PORT_HTTP": "8000", "SGLANG_ROUTER_SERVICE_PORT": "8000"},
        {"SGLANG_ROUTER_PORT_8000": "1"},
        {"SGLANG_ROUTER_URL": "tcp://10.96.3.4:8000"},
    ],
    ids=str,
)
def test_service_links_variables_that_may_be_settings_are_kept(environ: dict[str, str]) -> None:
    assert without_service_links(environ) == environ


def test_config_links_of_a_service_are_no_settings() -> None:
    environ = {"SGLANG_CAKE_QUEUE_DEPTH": "3"} | links("SGLANG_CAKE_STORE") | links("SGLANG_CAKE")
    assert resolve({}, environ) == CakeConfig(queue_depth=3)
