"""Reports of corrupt blocks, which no reader waits for."""

import asyncio

import pytest

from sglang_cake.core.errors import BlockCorrupt, BlockMissing, StoreUnavailable
from sglang_cake.stores.corrupt_reports import MOST_REPORTS, REPORT_S, CorruptReports
from sglang_cake.testing.store_contract import key_of
from sglang_cake.testing.virtual_time import in_virtual_time

KEYS = [key_of(n) for n in range(2 * MOST_REPORTS)]


def test_corrupt_reports_beyond_the_bound_are_left_out():
    begun, go = [], asyncio.Event()

    async def report(key):
        begun.append(key)
        await go.wait()
        raise StoreUnavailable("down")

    async def main():
        reports = CorruptReports(report)
        for key in (*KEYS, KEYS[0]):
            reports.begin(key)
        assert reports.among(KEYS) == {*KEYS[:MOST_REPORTS]}
        go.set()
        await reports.end_all()
        assert begun == KEYS[:MOST_REPORTS]
        assert not reports.among(KEYS)

    asyncio.run(main())


def test_corrupt_reports_without_an_answer_end_at_their_limit():
    async def main():
        reports = CorruptReports(lambda key: asyncio.Event().wait())
        reports.begin(KEYS[0])
        await reports.end(KEYS[1])
        assert asyncio.get_running_loop().time() == 0
        await reports.end(KEYS[0])
        return asyncio.get_running_loop().time()

    assert in_virtual_time(main()) == REPORT_S


def test_corrupt_reports_block_is_missing_from_its_corrupt_read_to_the_end_of_the_report():
    reported, go = [], asyncio.Event()

    async def report(key):
        reported.append(key)
        await go.wait()

    async def main():
        reports = CorruptReports(report)
        with pytest.raises(BlockCorrupt), reports.reading(KEYS[0]):
            raise BlockCorrupt("found by the read")
        with pytest.raises(BlockMissing), reports.reading(KEYS[0]):
            raise AssertionError("a block that is being reported is not read")
        with reports.reading(KEYS[1]):
            pass
        go.set()
        await reports.end_all()
        with reports.reading(KEYS[0]):
            pass
        assert reported == KEYS[:1]

    asyncio.run(main())
