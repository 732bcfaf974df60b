"""`sglang-cake doctor`: what it says of stores, each fault by its real cause."""

import asyncio
import contextlib
import fcntl
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from filestore import waiting_for_the_index
from moto_process import moto
from storetools import ALICE, fill, held, url_of
from system_calls import Disk, reads_of_this_process

from sglang_cake.cli.doctor import KvSizes, store_findings, stores_of
from sglang_cake.cli.named_stores import NamedStore
from sglang_cake.config import CakeConfig
from sglang_cake.demo.sglang_server import free_port
from sglang_cake.stores.file.block_files import INDEX, INDEX_LOCK
from sglang_cake.stores.file.index import BlockIndex
from sglang_cake.stores.file.nofollow import lock, open_private
from sglang_cake.testing.memory_store import MemoryStore

MODEL = KvSizes(block_bytes=2 << 20, end_blocks=0, stored_token_bytes=1000)


def said(url, kv=MODEL):
    """Lines and speed of a store."""
    (store,) = stores_of(CakeConfig(store=url))
    return said_of(store, kv)


def said_of(store, kv=MODEL):
    """The same, however busy the disk is."""
    return asyncio.run(store_findings(store, 2, kv, bench_bytes=1 << 20, bench_s=600.0))


def refusal(url):
    """The only line of a store that cannot be used."""
    return refusal_of(said(url))


def refusal_of(found):
    (line,), bytes_per_s = found
    assert line.state == "mend"
    assert bytes_per_s is None
    assert "\n" not in line.text
    return line.text


def test_doctor_of_root_on_the_folder_of_another_user_says_who_should_run_it(tmp_path, monkeypatch):
    if os.geteuid() == 0:
        os.chown(tmp_path, 10001, 10001)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "(sudo -u '" in refusal(url_of(tmp_path))
    assert not any(tmp_path.iterdir())


def test_doctor_measures_a_store_and_leaves_its_blocks_alone(tmp_path):
    fill(tmp_path, ALICE, "a")
    before = sorted(tmp_path.rglob("*"))
    (speed, space), bytes_per_s = said(f"{url_of(tmp_path)}&capacity=100MB")
    assert speed.state in ("ok", "note"), "a note if the page cache served the reads"
    assert bytes_per_s > 0
    assert "in blocks of 2 MiB" in speed.text
    assert (space.state, space.text) == (
        "ok",
        f"100 MB in {tmp_path}, for the KV of 100,000 tokens",
    )
    assert sorted(tmp_path.rglob("*")) == before
    assert len(held(tmp_path, ALICE)) == 1


def test_doctor_without_a_model_measures_a_store_too(tmp_path):
    (speed, space), _ = said(url_of(tmp_path), kv=None)
    assert "in blocks of 1 MiB" in speed.text
    assert "tokens" not in space.text


def test_doctor_reads_from_the_page_cache_are_a_note(tmp_path, monkeypatch):
    reads_of_this_process(monkeypatch, lambda: 7)
    (speed, _), _ = said(url_of(tmp_path))
    assert speed.state == "note"
    assert "page cache" in speed.text


def test_doctor_folder_of_others_is_to_mend(tmp_path):
    (tmp_path / "thesis.tex").write_text("do not delete")
    assert "neither empty nor a store: choose another folder" in refusal(f"file://{tmp_path}")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_doctor_folder_that_cannot_be_made_is_to_mend(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be made or written" in refusal(f"file://{tmp_path}/file/kv")


def test_doctor_disk_without_room_is_to_mend(tmp_path):
    assert "no room to measure" in refusal(f"file://{tmp_path}?min_free=999PB")


def test_doctor_of_a_nearly_full_store_evicts_nothing(tmp_path):
    large = replace(MODEL, block_bytes=8 << 20)  # of which it writes four
    fill(tmp_path, ALICE, *[str(number) for number in range(200)])
    (line, space), bytes_per_s = said(f"{url_of(tmp_path)}&capacity=32MB", large)
    assert line.state == "note"
    assert "more would evict blocks of the store; reading and writing were not" in line.text
    assert bytes_per_s is None
    assert space.state == "ok"
    assert len(held(tmp_path, ALICE)) == 200


def test_doctor_store_whose_index_is_being_rebuilt_is_a_note_without_its_space(tmp_path):
    fill(tmp_path, ALICE, "a")
    rebuilding = open_private(tmp_path / INDEX_LOCK)
    assert lock(rebuilding, fcntl.LOCK_EX)
    with contextlib.closing(BlockIndex(tmp_path / INDEX)) as index:
        index.clear()  # as the rebuild begins
    (store,) = stores_of(CakeConfig(store=url_of(tmp_path)))
    with waiting_for_the_index(0.0):
        found = asyncio.run(store_findings(store, 2, MODEL, bench_s=0.05))
    os.close(rebuilding)
    (line,), bytes_per_s = found
    assert line.state == "note"
    assert "its index is being rebuilt" in line.text
    assert "`sglang-cake store gc` completes that" in line.text
    assert bytes_per_s is None


def test_doctor_capacity_that_the_disk_lacks_is_a_note(tmp_path):
    (_, space), _ = said(f"{url_of(tmp_path)}&capacity=999PB")
    assert space.state == "note"
    assert "no room for the capacity of 999 PB" in space.text


def test_doctor_on_a_file_system_without_a_size_names_the_capacity_or_no_limit(
    tmp_path, monkeypatch
):
    Disk(monkeypatch).lose_its_size()
    (_, space), _ = said(f"{url_of(tmp_path)}&capacity=1GB")
    assert (space.state, space.text.partition(",")[0]) == ("ok", f"1.0 GB in {tmp_path}")
    (_, space), _ = said(url_of(tmp_path))
    assert (space.state, space.text) == ("ok", f"no limit in {tmp_path}")


def test_doctor_slow_store_is_given_up_and_cleaned():
    class FullHourStore(MemoryStore):
        async def put(self, key, data):
            await super().put(key, data)
            await asyncio.sleep(3600)

    store = FullHourStore()
    source = SimpleNamespace(check=lambda: None, open=lambda frame, depth: store)
    findings = store_findings(NamedStore("slow://", source), 2, MODEL, bench_s=0.05, hang_s=600.0)
    text = refusal_of(asyncio.run(findings))
    assert "0.05 s were not enough" in text
    assert not store.blocks, "what it wrote is deleted"


async def test_doctor_interrupted_deletes_its_blocks():
    writes = threading.Event()

    class FullHourStore(MemoryStore):
        async def put(self, key, data):
            await super().put(key, data)
            writes.set()
            await asyncio.sleep(3600)

    store = FullHourStore()
    source = SimpleNamespace(check=lambda: None, open=lambda frame, depth: store)
    named = NamedStore("slow://", source)
    finding = asyncio.create_task(store_findings(named, 2, MODEL, bench_s=600.0, hang_s=600.0))
    assert await asyncio.to_thread(writes.wait, 60)
    assert store.blocks
    finding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await finding
    assert not store.blocks


async def test_doctor_interrupted_while_it_deletes_its_blocks_deletes_the_others():
    interrupted = []

    class InterruptedStore(MemoryStore):
        async def delete(self, key):
            if not interrupted:
                interrupted.append(key)
                loop.call_soon_threadsafe(finding.cancel)
                await asyncio.sleep(3600)
            await super().delete(key)

    store, loop = InterruptedStore(), asyncio.get_running_loop()
    source = SimpleNamespace(check=lambda: None, open=lambda frame, depth: store)
    finding = asyncio.create_task(
        store_findings(
            NamedStore("slow://", source),
            2,
            MODEL,
            bench_bytes=1 << 20,
            bench_s=600.0,
            hang_s=600.0,
        )
    )
    with pytest.raises(asyncio.CancelledError):
        await finding
    assert interrupted
    assert not store.blocks


@pytest.mark.parametrize("call", ["check", "open"])
def test_doctor_store_that_hangs_is_given_up(call):
    go, went_on = threading.Event(), []
    source = SimpleNamespace(check=lambda: None, open=lambda frame, depth: MemoryStore())
    setattr(source, call, lambda *args, **options: went_on.append(go.wait(10)))
    findings = store_findings(NamedStore("hangs://", source), 2, MODEL, bench_s=0.05)
    text = refusal_of(asyncio.run(findings))
    assert not went_on
    go.set()
    assert "0.05 s were not enough" in text


def test_doctor_store_whose_call_cannot_be_cancelled_is_given_up():
    go, went_on = threading.Event(), []

    class HungStore(MemoryStore):
        async def put(self, key, data):
            went_on.append(go.wait(10))

    source = SimpleNamespace(check=lambda: None, open=lambda frame, depth: HungStore())
    store = NamedStore("hangs://", source)
    findings = store_findings(store, 2, MODEL, bench_s=0.05, hang_s=0.05)
    text = refusal_of(asyncio.run(findings))
    assert not went_on
    go.set()
    assert text.startswith("hangs://: a call has hung for 0.05 s: see that")


def test_doctor_closed_port_is_to_mend():
    text = refusal(f"http://127.0.0.1:{free_port()}")
    assert "Cannot connect to host" in text
    assert "see that it runs" in text


def test_doctor_token_file_that_is_absent_is_to_mend(tmp_path):
    assert "token file" in refusal(f"http://127.0.0.1:1?token_file={tmp_path}/none")


def test_doctor_wrong_credentials_and_no_bucket_are_to_mend(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anyone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
    with moto(INITIAL_NO_AUTH_ACTION_COUNT="0") as strict:
        text = refusal_of(said_of(NamedStore("s3", strict.source("any-bucket"))))
    assert "check the credentials" in text
    assert "anything" not in text
    with moto() as server:
        absent = said_of(NamedStore("s3", server.source("nobody-made-this")))
        assert "does not exist: make it first" in refusal_of(absent)
        (speed,), bytes_per_s = said(server.url(server.make_bucket()))
    assert speed.state == "ok"
    assert bytes_per_s > 0
