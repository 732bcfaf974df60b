"""What an operator reads of an outage: which fault, that the store is left alone, and its end."""

import logging

import pytest
from http_servers import framed
from test_http_faults import against, get_a

from sglang_cake.errors import StoreError

GOOD = framed("a")
OPENS_AFTER = 5  # failures in a row


def status(asked):
    asked.answer(500, b"the disk is on fire")


def corrupt(asked):
    asked.answer(200, GOOD[:-1] + bytes([GOOD[-1] ^ 1]))


def redirected(asked):
    asked.answer(307, headers="Location: http://user:secret@elsewhere/\r\n")


def reset(asked):  # "Server disconnected", or "Connection reset by peer"
    asked.reset()


FAULTS = {
    status: "GET was answered 500: the disk is on fire",
    corrupt: "corrupt: the payload's checksum does not match",
    redirected: "GET was answered 307: a redirect, which is not followed",
    reset: "onnect",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_fault_of_a_read_is_said_once_and_so_is_its_end(fault, caplog):
    caplog.set_level(logging.INFO)
    well = []

    async def answer(asked):
        if well:
            asked.answer(200, GOOD)
        else:
            fault(asked)

    async def test(store, server):
        for _ in range(3 * OPENS_AFTER):
            with pytest.raises(StoreError) as caught:
                await get_a(store)
        assert FAULTS[fault] in str(caught.value)  # of a call that was not even sent
        lines = [record.message for record in caplog.records if server.base in record.message]
        assert len(lines) == 1
        assert "is asked again every 1 to 60 s" in lines[0]
        assert FAULTS[fault] in lines[0]
        assert "secret" not in caplog.text
        well.append(True)
        store._wire._breaker._until_s = 0.0  # the pause is over
        await get_a(store)
        await get_a(store)
        lines = [record.message for record in caplog.records if server.base in record.message]
        assert len(lines) == 2
        assert "is used again after" in lines[1]

    against(answer, test)
