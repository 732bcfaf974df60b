"""The server's log about requests, whose ids clients choose."""

import logging

import pytest
from kv_pools import record_of

from sglang_cake.integration.request.request_reporter import RequestReporter


@pytest.mark.parametrize("rid", ["r\ncake is switched off", "r\r\x1b[2K", "r prompt=1 loaded=9"])
def test_request_reporter_id_of_a_client_adds_no_line_and_no_field(
    rid: str, caplog: pytest.LogCaptureFixture
) -> None:
    record = record_of(2, block=4, rid=rid)
    record.agreed.stored = (True, True)
    reporter = RequestReporter(None, writes=True, metrics=None)
    with caplog.at_level(logging.INFO):
        reporter.gave_up(record, 0.5)
        reporter.ended(record)
    assert len(caplog.messages) == 2
    for line in caplog.messages:
        assert line.isprintable()
        assert f"{rid!r} " in line
