"""`sglang-cake store`, on real file stores."""

import asyncio
import contextlib
import errno
import fcntl
import itertools
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
from filestore import closing, waiting_for_the_index
from hostile import SHORT_WAIT_S
from namespace_folder import NamespaceFolder
from polling import until
from storetools import (
    ALICE,
    BOB,
    file_of,
    fill,
    flip,
    frame_named,
    held,
    opened_store,
    store,
    told,
    url_of,
)
from system_calls import Disk, failing

import sglang_cake
from sglang_cake.cli import PIPE_STATUS, named_stores, store_maintenance
from sglang_cake.cli.named_stores import run_tool
from sglang_cake.cli.store_cp import lacking
from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.keys import Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.stores.base import WrapperStore
from sglang_cake.stores.file.block_files import INDEX, INDEX_LOCK, new_tmp_name
from sglang_cake.stores.file.file_store import FileSource
from sglang_cake.stores.file.index import BlockIndex
from sglang_cake.stores.file.nofollow import lock, open_private
from sglang_cake.stores.lookup_rounds import EXACT_KEYS, look_up_in_rounds
from sglang_cake.testing.memory_store import MemoryStore
from sglang_cake.testing.store_contract import FRAME, LAYOUT, block_of, key_of, read

FRAMED = 2 * 4096  # what a block takes on the disk


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("filled") / "kv"
    fill(folder, ALICE, "a", "b", "c")
    fill(folder, BOB, "d")
    return folder


@pytest.fixture
def root(filled, tmp_path):
    """A store of two namespaces."""
    return shutil.copytree(filled, tmp_path / "kv")


# ---- as root ----

SERVICE_USER = 10001


def belongs_to_a_service(monkeypatch, *paths):
    """As from then on for root, also where the tests run as another user."""
    if os.geteuid() == 0:
        for path in paths:
            os.chown(path, SERVICE_USER, SERVICE_USER)
    monkeypatch.setattr(os, "geteuid", lambda: 0)


@pytest.mark.parametrize(
    "tool",
    [
        ["verify"],
        ["gc"],
        ["gc", "--to", "1MB"],
        ["clear", "--yes"],
        ["bench", "--sizes", "4KiB", "--bytes", "64KiB"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("is_new", [True, False])
def test_store_tool_of_root_on_the_folder_of_another_user_is_refused_and_writes_nothing(
    root, capsys, monkeypatch, tool, is_new
):
    """Files of root would lock that user out."""
    index = [] if is_new else [*root.glob("index.*")]
    for path in root.glob("index.*") if is_new else ():
        path.unlink()
    belongs_to_a_service(monkeypatch, root, *index)
    before = files_of(root)
    assert store(tool[0], url_of(root), *tool[1:]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"store folder {root} belongs to " in line
    assert "(sudo -u '" in line
    assert "if the server runs as root, too, start it first" in line
    assert files_of(root) == before


def test_store_cp_of_root_into_the_folder_of_another_user_is_refused(
    root, tmp_path, capsys, monkeypatch
):
    target = tmp_path / "target"
    target.mkdir()
    belongs_to_a_service(monkeypatch, target)
    assert store("cp", url_of(root), url_of(target)) == 2
    assert "(sudo -u '" in capsys.readouterr().err
    assert not any(target.iterdir())


def test_store_ls_and_stat_of_root_on_the_folder_of_another_user_answer(root, capsys, monkeypatch):
    belongs_to_a_service(monkeypatch, root, *root.glob("index.*"))
    assert store("ls", url_of(root)) == store("stat", url_of(root)) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_store_tools_of_root_on_a_folder_that_root_serves_work(root, capsys):
    """As in a container whose server is root, with a folder of a user of the machine."""
    os.chown(root, SERVICE_USER, SERVICE_USER)
    assert store("verify", url_of(root)) == store("gc", url_of(root)) == 0


async def test_file_store_of_a_server_of_root_takes_the_folder_of_another_user(root, monkeypatch):
    belongs_to_a_service(monkeypatch, root, *root.glob("index.*"))
    async with opened_store(root, ALICE) as served:
        assert await served.contains([key_of("a")]) == [True]


# ---- ls and stat ----


def test_store_ls_prints_a_table_of_the_stored_namespaces(root, capsys):
    assert store("ls", url_of(root)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == url_of(root)
    heads = "NAMESPACE MODEL DTYPE TP RANK BLOCKS BYTES LAST USED"
    assert " ".join(lines[1].split()) == heads
    found = {line.split()[1]: line.split() for line in lines[2:]}
    assert found.keys() == {"alice-7b", "bob-13b"}
    assert found["alice-7b"][0] == ALICE.digest.hex()[:12]
    assert found["alice-7b"][2:5] == ["bfloat16", "1/2", "3"]
    assert found["bob-13b"][2:5] == ["bfloat16", "0/1", "1"]


def test_store_ls_json_lists_namespaces_with_blocks_and_bytes(root, capsys):
    (answer,) = told(capsys, "ls", url_of(root))["stores"]
    found = {each["fields"]["name"]: each for each in answer["namespaces"]}
    assert found["alice-7b"]["namespace"] == ALICE.digest.hex()
    assert found["alice-7b"]["blocks"] == 3
    assert found["alice-7b"]["bytes"] == 3 * FRAMED
    assert found["bob-13b"]["last_used_s"] > 1_500_000_000


def test_store_ls_of_a_namespace_lists_its_blocks(root, capsys):
    assert store("ls", url_of(root), ALICE.digest.hex()[:8]) == 0
    out = capsys.readouterr().out
    assert {line.split()[0] for line in out.splitlines()[1:]} == {
        key_of(name).hex() for name in "abc"
    }
    assert store("ls", url_of(root), ALICE.digest.hex(), "--json") == 0
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(block["key"] for block in listed) == sorted(key_of(n).hex() for n in "abc")
    assert {block["bytes"] for block in listed} == {FRAMED}


def test_store_tools_on_an_empty_store_succeed(tmp_path, capsys):
    for tool in (["ls"], ["stat"], ["verify"], ["gc"], ["clear", "--yes"]):
        assert store(*tool, url_of(tmp_path)) == 0
        assert capsys.readouterr().out
    assert told(capsys, "stat", url_of(tmp_path))["stores"][0]["blocks"] == 0
    assert store("cp", url_of(tmp_path), url_of(tmp_path / "other")) == 0


def test_store_stat_sums_over_all_namespaces(root, capsys):
    (answer,) = told(capsys, "stat", url_of(root))["stores"]
    assert answer["namespaces"] == 2
    assert answer["blocks"] == 4
    (listed,) = told(capsys, "ls", url_of(root))["stores"]
    assert answer["block_bytes"] == sum(each["bytes"] for each in listed["namespaces"])
    assert answer["used_bytes"] > answer["block_bytes"] >= 4 * FRAMED  # the index, folders
    assert answer["disk_free_bytes"] > 0
    assert store("stat", url_of(root)) == 0
    heads, row = capsys.readouterr().out.splitlines()
    assert heads.startswith("STORE")
    assert row.startswith(url_of(root))


def files_of(root):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in root.rglob("*")}


@pytest.mark.parametrize("index", [True, False])
def test_store_stat_changes_no_file_and_agrees_with_ls(root, capsys, index):
    flip(file_of(root, ALICE, "b"))
    assert store("verify", url_of(root)) == 1  # sets it aside: it is listed no more
    capsys.readouterr()
    if not index:
        for path in root.glob("index*"):
            path.unlink()
    before = files_of(root)
    (totals,) = told(capsys, "stat", url_of(root))["stores"]
    (listed,) = told(capsys, "ls", url_of(root))["stores"]
    assert files_of(root) == before
    assert totals["blocks"] == sum(each["blocks"] for each in listed["namespaces"]) == 3
    assert totals["block_bytes"] == sum(each["bytes"] for each in listed["namespaces"])


def test_store_ls_and_stat_during_the_rebuild_of_an_index_count_all_blocks(root, capsys):
    with contextlib.closing(BlockIndex(root / INDEX)) as index:
        index.clear()  # as a rebuild begins
    (listed,) = told(capsys, "ls", url_of(root))["stores"]
    assert sorted(namespace["blocks"] for namespace in listed["namespaces"]) == [1, 3]
    (totals,) = told(capsys, "stat", url_of(root))["stores"]
    assert (totals["blocks"], totals["block_bytes"]) == (4, 4 * FRAMED)


def test_store_tools_with_several_tiers_report_each_tier(root, tmp_path, capsys):
    other = tmp_path / "other"
    fill(other, ALICE, "a")
    found = told(capsys, "stat", f"{url_of(root)},{url_of(other)}")["stores"]
    assert [each["blocks"] for each in found] == [4, 1]
    found = told(capsys, "verify", f"{url_of(root)},{url_of(other)}")["stores"]
    assert [each["ok"] for each in found] == [4, 1]


FOREIGN = {
    "no description": None,
    "not json": "what?",
    "a list": "[1]",
    "numbers": '{"model": 7, "layout": "x"}',
    "no layout": '{"model": "x"}',
    "bad layout": '{"model": "x", "layout": "{}"}',
    "half a character": '{"model": "\\ud800", "layout": ' + json.dumps(LAYOUT.describe()) + "}",
    "of another namespace": json.dumps(ALICE.namespace.describe()),
}


@pytest.mark.parametrize("description", FOREIGN)
def test_store_tools_unreadable_namespace_is_named_and_exit_status_1(
    root, tmp_path, capsys, description
):
    foreign = root / ("f" * 64)
    foreign.mkdir()
    (foreign / "notes").write_text("an empty folder would be removed")
    if FOREIGN[description] is not None:
        (foreign / "namespace.json").write_text(FOREIGN[description])
    before = sorted(foreign.rglob("*"))
    assert store("ls", url_of(root)) == 0
    assert "(unreadable: " in capsys.readouterr().out
    for tool, status in (
        (["stat", url_of(root)], 0),
        (["ls", url_of(root), "ffff"], 1),
        (["verify", url_of(root)], 1),
        (["gc", url_of(root), "--to", "1TB"], 1),
        (["cp", url_of(root), url_of(tmp_path / "copy")], 1),
        (["clear", url_of(root), "--yes"], 1),
    ):
        assert store(*tool) == status
        captured = capsys.readouterr()
        assert captured.err.count("namespace ffffffffffff: ") == 1
        assert len(captured.err.splitlines()) == 1
    assert sorted(foreign.rglob("*")) == before
    assert held(root, BOB) == set()
    assert len(held(tmp_path / "copy", ALICE)) == 3, "the others are copied"


GIB = 2**30


def describe_blocks_of(root, block_bytes):
    """A namespace whose description says that its blocks are so large, with a file of 1 byte."""
    layout = BlockLayout.plain(1, (("k", (block_bytes,)),), "uint8", 1)
    namespace = Namespace((("model", "hostile"), ("layout", layout.describe())))
    folder = NamespaceFolder(root, namespace.digest())
    folder.block(key_of("z")).parent.mkdir(parents=True)
    folder.block(key_of("z")).write_bytes(b"z")
    folder.description.write_text(json.dumps(namespace.describe()))
    for path in root.glob("index.*"):  # it does not have the file
        path.unlink()
    return namespace.digest().hex()


def run_limited(*args, most_bytes):
    """A store tool in a process of at most so much memory."""
    code = (
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({most_bytes}, {most_bytes}))\n"
        "from sglang_cake.cli import main\n"
        "status = main(['store', *sys.argv[1:]])\n"
        # Not `ru_maxrss`, in which Linux counts the memory of the process that forked this one.
        "text = open('/proc/self/status').read()\n"
        "print(int(text.split('VmHWM:')[1].split()[0]) << 10)\n"
        "sys.exit(status)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True
    )


@pytest.mark.parametrize("tool", ["verify", "cp"])
def test_store_tool_takes_no_memory_for_blocks_that_a_description_makes_up(root, tmp_path, tool):
    describe_blocks_of(root, GIB // 2)
    to = [url_of(tmp_path / "copy")] if tool == "cp" else []
    done = run_limited(tool, url_of(root), *to, "--json", most_bytes=16 * GIB)
    assert done.returncode == 1, done.stderr
    answer, peak_bytes = done.stdout.splitlines()
    assert int(peak_bytes) < GIB, "eight such blocks have 4 GiB"
    result = json.loads(answer) if tool == "cp" else json.loads(answer)["stores"][0]
    assert (result["corrupt"], result["ok" if tool == "verify" else "copied"]) == (1, 4)
    assert not result["unreadable_namespaces"]


@pytest.mark.parametrize("tool", ["verify", "cp"])
def test_store_tool_without_memory_for_a_namespace_names_it_and_does_the_others(
    root, tmp_path, tool
):
    digest = describe_blocks_of(root, 16 * GIB)
    to = [url_of(tmp_path / "copy")] if tool == "cp" else []
    done = run_limited(tool, url_of(root), *to, "--json", most_bytes=16 * GIB)
    assert done.returncode == 1
    assert f"{digest[:12]}: no memory for 8 blocks of 16 GiB: lower --depth\n" in done.stderr
    result = json.loads(done.stdout.splitlines()[0])
    result = result if tool == "cp" else result["stores"][0]
    assert result["ok" if tool == "verify" else "copied"] == 4
    assert [*result["unreadable_namespaces"]] == [digest]


def test_store_ls_control_characters_in_names_are_replaced(tmp_path, capsys):
    fill(tmp_path, frame_named("evil\x1b[2J\nname" + "x" * 100), "a")
    assert store("ls", url_of(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 3
    assert "evil?[2J?name" in out


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("tool", ["ls", "stat", "verify", "gc"])
def test_store_tools_folder_that_cannot_be_listed_is_one_line_of_error(
    root, capsys, monkeypatch, tool, at
):
    for path in root.glob("index.db*"):
        path.unlink()
    calls, scandir = itertools.count(), os.scandir

    def fail_from(*args):
        if next(calls) >= at:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return scandir(*args)

    monkeypatch.setattr(os, "scandir", fail_from)
    with waiting_for_the_index(SHORT_WAIT_S):
        status = store(tool, url_of(root))
    captured = capsys.readouterr()
    assert captured.err.count(os.strerror(errno.EMFILE)) == 1
    assert len(captured.err.splitlines()) == 1
    assert status == 2


@pytest.mark.parametrize("tool", [["verify"], ["gc"], ["clear", "--yes"]], ids=" ".join)
def test_store_tools_beside_a_bad_sector_use_the_index_that_they_rebuild(
    root, capsys, monkeypatch, tool
):
    name, *options = tool
    stored = told(capsys, "stat", url_of(root))["stores"][0]["blocks"]
    for file in root.glob(f"{INDEX}*"):
        file.unlink()
    damaged, stat = file_of(root, ALICE, "a").stat(), os.stat

    def fail_for_one(path, **how):
        found = stat(path, **how)
        if os.path.samestat(found, damaged):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return found

    monkeypatch.setattr(os, "stat", fail_for_one)
    with waiting_for_the_index(0.0):  # as of a folder whose files take longer than that to read
        assert store(name, url_of(root), *options) == 0
    capsys.readouterr()
    left = 0 if name == "clear" else stored - 1
    assert told(capsys, "stat", url_of(root))["stores"][0]["blocks"] == left


@pytest.mark.parametrize(
    "tool",
    [
        ["verify", "{url}"],
        ["gc", "{url}"],
        ["gc", "{url}", "--to", "1kB"],
        ["clear", "{url}", "--yes"],
        ["cp", "{url}", "file://{copy}"],
        ["bench", "{url}", "--sizes", "4KiB", "--depths", "1", "--bytes", "64KiB"],
    ],
    ids=" ".join,
)
def test_store_tools_during_the_rebuild_of_an_index_wait_for_its_end(root, tmp_path, caplog, tool):
    tool = [part.format(url=url_of(root), copy=tmp_path / "copy") for part in tool]
    rebuilding = open_private(root / INDEX_LOCK)
    assert lock(rebuilding, fcntl.LOCK_EX)
    status = []
    with waiting_for_the_index(0.0):
        running = threading.Thread(target=lambda: status.append(store(*tool)))
        running.start()
        line = "waiting while its index is being rebuilt"
        until(lambda: line in caplog.text or not running.is_alive(), "it says that it waits")
        os.close(rebuilding)
        running.join()
    assert line in caplog.text
    assert status == ["1kB" in tool], "one byte more than the index is not reached"


def test_store_verify_and_cp_of_a_read_only_store_read_all_blocks(
    root, tmp_path, capsys, monkeypatch
):
    flip(file_of(root, ALICE, "b"))
    real_open = os.open

    def read_only_open(path, flags, *args, **options):
        if flags & (os.O_WRONLY | os.O_RDWR) and str(path).startswith(str(root)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real_open(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", read_only_open)
    monkeypatch.setattr(os, "unlink", failing(errno.EROFS))
    with waiting_for_the_index(0.0):
        (verified,) = told(capsys, "verify", url_of(root), status=1)["stores"]
        assert (verified["ok"], verified["corrupt"], verified["unanswered"]) == (3, 1, 0)
        monkeypatch.undo()
        monkeypatch.setattr(os, "open", read_only_open)
        copied = told(capsys, "cp", url_of(root), url_of(tmp_path / "copy"), status=1)
    assert (copied["copied"], copied["corrupt"]) == (3, 1)


def test_store_tool_interrupted_while_an_index_is_rebuilt_ends(root):
    rebuilding = open_private(root / INDEX_LOCK)
    assert lock(rebuilding, fcntl.LOCK_EX)
    with process(
        *("gc", url_of(root)),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as waiting:
        try:
            line = waiting.stderr.readline()
            waiting.send_signal(signal.SIGINT)
            _, err = waiting.communicate(timeout=60)
        finally:
            waiting.kill()
            os.close(rebuilding)
    assert line == f"store {root}: waiting while its index is being rebuilt\n"
    assert err == "interrupted\n"
    assert waiting.returncode == 130


# ---- verify ----


def test_store_verify_corrupt_block_is_reported_and_set_aside(root, capsys):
    assert store("verify", url_of(root)) == 0
    capsys.readouterr()
    flip(file_of(root, ALICE, "b"))
    (answer,) = told(capsys, "verify", url_of(root), status=1)["stores"]
    assert (answer["ok"], answer["corrupt"], answer["missing"]) == (3, 1, 0)
    assert answer["ok_bytes"] == 3 * FRAMED
    assert answer["corrupt_blocks"] == [f"{ALICE.digest.hex()}/{key_of('b').hex()}"]
    assert held(root, ALICE) == {key_of("a"), key_of("c")}
    assert store("verify", url_of(root)) == 0, "it is out of the way now"


def times_of_use(root, frame):
    """By key: when the index says that a block was used, and when its file does."""

    async def main():
        async with opened_store(root, frame) as opened:
            return {block.key: block.used_s async for block in opened.list_blocks()}

    booked = asyncio.run(main())
    place = NamespaceFolder(root, frame.digest)
    return {key: (used_s, place.block(key).stat().st_atime_ns) for key, used_s in booked.items()}


async def read_from(root, frame, name):
    async with opened_store(root, frame) as opened:
        return await read(opened, key_of(name))


def test_store_verify_and_cp_leave_access_times_unchanged(root, tmp_path):
    for key in held(root, ALICE):
        os.utime(NamespaceFolder(root, ALICE.digest).block(key), (1e9, 1e9))  # read long ago
    before = times_of_use(root, ALICE)
    assert store("verify", url_of(root)) == 0
    assert store("cp", url_of(root), url_of(tmp_path / "copy")) == 0
    assert times_of_use(root, ALICE) == before
    asyncio.run(read_from(root, ALICE, "a"))  # as a server does
    after = times_of_use(root, ALICE)
    assert after[key_of("a")][0] > before[key_of("a")][0]
    assert {key for key in after if after[key][0] != before[key][0]} == {key_of("a")}


def test_store_verify_prints_the_key_of_a_corrupt_block(root, capsys):
    flip(file_of(root, BOB, "d"))
    assert store("verify", url_of(root), "--depth", "1") == 1
    out = capsys.readouterr().out
    assert f"corrupt: {BOB.digest.hex()}/{key_of('d').hex()}" in out


def test_store_verify_of_one_namespace_ignores_the_others(root, capsys):
    flip(file_of(root, BOB, "d"))
    argument = ["verify", url_of(root), "--namespace"]
    assert told(capsys, *argument, ALICE.digest.hex()[:6].upper())["stores"][0]["ok"] == 3
    assert told(capsys, *argument, BOB.digest.hex(), status=1)["stores"][0]["corrupt"] == 1


# ---- gc and clear ----


def test_store_gc_removes_corrupt_and_stale_files_only(root, capsys):
    flip(file_of(root, ALICE, "b"))
    assert store("verify", url_of(root)) == 1
    capsys.readouterr()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    ours = file_of(root, ALICE, "a").parent / new_tmp_name()
    stale = ours.with_name(ours.name.replace(f"-{os.getpid()}-", f"-{ended.pid}-"))
    old = file_of(root, BOB, "d").parent / new_tmp_name()
    for path in (ours, stale, old):
        path.write_bytes(b"x")
    os.utime(old, (1_000_000_000, 1_000_000_000))
    (answer,) = told(capsys, "gc", url_of(root))["stores"]
    assert answer["corrupt_files"] == 1
    assert ours.exists()
    assert not stale.exists()
    assert not old.exists()
    assert not any((root / ALICE.digest.hex() / "corrupt").iterdir())
    assert held(root, ALICE) == {key_of("a"), key_of("c")}


def used_at(root, blocks):
    """Sets the times of use: of the first block the oldest."""
    for age, (frame, name) in enumerate(blocks):
        at_s = 1_600_000_000 + age
        os.utime(file_of(root, frame, name), (at_s, at_s))
    for path in root.glob("index.db*"):  # made anew, from the times of the files
        path.unlink()
    held(root, ALICE)  # makes it


def test_store_gc_to_a_size_evicts_least_recently_used_blocks(root, capsys):
    left = [(ALICE, "c"), (BOB, "d"), (ALICE, "a"), (ALICE, "b")]
    used_at(root, left)
    while left:
        (before,) = told(capsys, "stat", url_of(root))["stores"]
        to_bytes = before["used_bytes"] - FRAMED // 2
        (answer,) = told(capsys, "gc", url_of(root), "--to", to_bytes)["stores"]
        (after,) = told(capsys, "stat", url_of(root))["stores"]
        assert answer["evicted_blocks"] == 1
        assert answer["evicted_bytes"] == before["block_bytes"] - after["block_bytes"] == FRAMED
        assert after["used_bytes"] <= to_bytes
        left.pop(0)
        for frame in (ALICE, BOB):
            assert held(root, frame) == {key_of(name) for of, name in left if of is frame}
    assert told(capsys, "gc", url_of(root), "--to", "1GB")["stores"][0]["evicted_blocks"] == 0


def test_store_gc_that_holds_few_blocks_at_once_evicts_the_same(root, capsys, monkeypatch):
    monkeypatch.setattr(store_maintenance, "MOST_HELD", 1)
    in_order = [(ALICE, "c"), (BOB, "d"), (ALICE, "a"), (ALICE, "b")]
    used_at(root, in_order)
    (before,) = told(capsys, "stat", url_of(root))["stores"]
    to_bytes = before["used_bytes"] - 5 * FRAMED // 2  # a block also has two folders
    (answer,) = told(capsys, "gc", url_of(root), "--to", to_bytes)["stores"]
    assert answer["evicted_blocks"] == 2
    for frame in (ALICE, BOB):
        assert held(root, frame) == {key_of(name) for of, name in in_order[2:] if of is frame}
    assert told(capsys, "gc", url_of(root), "--to", 1, status=1)["stores"][0]["evicted_blocks"] == 2


def test_store_gc_evicts_blocks_whose_files_are_empty(root, capsys):
    """A power cut leaves such files, of the newest blocks."""
    for frame, name in ((BOB, "d"), (ALICE, "b")):
        os.truncate(file_of(root, frame, name), 0)
    used_at(root, [(ALICE, "c"), (ALICE, "a"), (BOB, "d"), (ALICE, "b")])
    (answer,) = told(capsys, "gc", url_of(root), "--to", "4KiB", status=1)["stores"]
    assert (answer["evicted_blocks"], answer["evicted_bytes"]) == (4, 2 * FRAMED)


def test_store_clear_deletes_one_namespace_or_all(root, capsys):
    answer = told(capsys, "clear", url_of(root), "--namespace", BOB.digest.hex()[:9], "--yes")
    assert answer["stores"][0]["deleted_blocks"] == 1
    assert len(held(root, ALICE)) == 3
    assert store("clear", url_of(root), "--yes") == 0
    assert "3 blocks deleted" in capsys.readouterr().out
    assert told(capsys, "ls", url_of(root))["stores"][0]["namespaces"] == []
    assert held(root, ALICE) == set()
    fill(root, ALICE, "a")  # and goes on being a store


@pytest.mark.parametrize(
    "tool", [["ls"], ["verify", "--namespace"], ["clear", "--yes", "--namespace"]]
)
def test_store_tools_start_of_two_namespaces_is_refused(root, capsys, tool):
    start = ALICE.digest.hex()[:2]
    assert BOB.digest.hex().startswith(start)
    name, *flags = tool
    assert store(name, url_of(root), *flags, start) == 2
    assert f"2 namespaces start with {start!r}" in capsys.readouterr().err
    assert (len(held(root, ALICE)), len(held(root, BOB))) == (3, 1)


def test_store_tools_namespace_of_one_tier_is_found_among_all(root, tmp_path, capsys):
    fill(tmp_path / "other", BOB, "d", "e")
    fill(tmp_path / "other2", BOB, "f")
    tiers = ",".join(url_of(each) for each in (root, tmp_path / "other", tmp_path / "other2"))
    alice, bob = (each.digest.hex() for each in (ALICE, BOB))
    assert [
        each["ok"] for each in told(capsys, "verify", tiers, "--namespace", alice)["stores"]
    ] == [
        3,
        0,
        0,
    ]
    assert store("ls", tiers, bob) == 0
    capsys.readouterr()
    answer = told(capsys, "clear", tiers, "--namespace", bob, "--yes")
    assert [each["deleted_blocks"] for each in answer["stores"]] == [1, 2, 1]
    assert store("clear", tiers, "--namespace", bob, "--yes") == 2
    assert f"no namespace starts with {bob!r}" in capsys.readouterr().err
    assert len(held(root, ALICE)) == 3


def test_store_clear_without_yes_asks_or_refuses(root, capsys):
    assert store("clear", url_of(root)) == 2
    assert "Say so with --yes" in capsys.readouterr().err
    for answer, left in (("n\n", 3), ("\n", 3), ("y\n", 0)):
        ours, theirs = pty.openpty()
        with os.fdopen(ours, "wb", buffering=0) as keyboard, os.fdopen(theirs, "r+b", 0) as screen:
            keyboard.write(answer.encode())
            done = subprocess.run(
                [sys.executable, "-m", "sglang_cake", "store", "clear", url_of(root)],
                stdin=screen,
                stderr=screen,
                stdout=subprocess.PIPE,
                env=environment(),
                timeout=60,
            )
        assert done.returncode == (0 if left == 0 else 2)
        assert len(held(root, ALICE)) == left


def test_store_gc_to_less_than_the_index_takes_is_exit_status_1(root, capsys):
    (answer,) = told(capsys, "gc", url_of(root), "--to", "4KiB", status=1)["stores"]
    assert answer["evicted_blocks"] == 4
    assert answer["excess_bytes"] > 0
    assert store("gc", url_of(root), "--to", "4KiB") == 1
    assert "are used, and no block is left to evict" in capsys.readouterr().err


@pytest.mark.parametrize("description", ["", None, "a link"])
def test_store_clear_deletes_a_namespace_with_a_damaged_description(
    root, tmp_path, capsys, description
):
    mine = tmp_path / "thesis.tex"
    mine.write_text("do not delete")
    damaged = NamespaceFolder(root, ALICE.digest).description
    damaged.unlink()
    if description == "a link":
        damaged.symlink_to(mine)
    elif description is not None:
        damaged.write_text(description)
    (root / ("e" * 64)).symlink_to(tmp_path)
    answer = told(capsys, "clear", url_of(root), "--yes")["stores"][0]
    assert (answer["deleted_blocks"], answer["unreadable_namespaces"]) == (4, {})
    assert [path for path in root.iterdir() if path.is_dir()] == [root / ("e" * 64)]
    assert mine.read_text() == "do not delete"
    fill(root, ALICE, "a")  # and goes on being a store


def test_store_clear_of_one_namespace_deletes_its_corrupt_files_only(root, capsys):
    for frame, name in ((ALICE, "b"), (BOB, "d")):
        flip(file_of(root, frame, name))
    assert store("verify", url_of(root)) == 1
    assert store("clear", url_of(root), "--namespace", ALICE.digest.hex(), "--yes") == 0
    assert not (root / ALICE.digest.hex()).exists()
    assert list((root / BOB.digest.hex() / "corrupt").iterdir())


# ---- cp ----


def test_store_cp_copies_missing_blocks_and_a_second_run_copies_none(root, tmp_path, capsys):
    other = tmp_path / "other"
    fill(other, ALICE, "b", "z")
    answer = told(capsys, "cp", url_of(root), url_of(other))
    assert (answer["copied"], answer["there_already"]) == (3, 1)
    assert answer["copied_bytes"] == 3 * FRAME.framed_bytes
    assert held(other, ALICE) == {key_of(name) for name in "abcz"}
    assert held(other, BOB) == {key_of("d")}
    assert asyncio.run(read_from(other, BOB, "d")) == block_of("d")
    assert len(held(root, ALICE)) == 3
    answer = told(capsys, "cp", url_of(root), url_of(other))
    assert (answer["copied"], answer["there_already"]) == (0, 4)


def test_store_cp_corrupt_block_is_not_copied(root, tmp_path, capsys):
    other = tmp_path / "other"
    flip(file_of(root, ALICE, "b"))
    arguments = ["--namespace", ALICE.digest.hex()[:6], "--depth", "1"]
    answer = told(capsys, "cp", url_of(root), url_of(other), *arguments, status=1)
    assert (answer["copied"], answer["corrupt"]) == (2, 1)
    assert held(other, ALICE) == {key_of("a"), key_of("c")}
    assert not (other / BOB.digest.hex()).exists()


def test_store_cp_of_more_blocks_than_one_lookup_copies_all(tmp_path, capsys):
    fill(tmp_path / "kv", BOB, *range(300))
    fill(tmp_path / "other", BOB, *range(0, 300, 2))
    answer = told(capsys, "cp", url_of(tmp_path / "kv"), url_of(tmp_path / "other"))
    assert (answer["copied"], answer["there_already"]) == (150, 150)
    assert len(held(tmp_path / "other", BOB)) == 300


async def test_store_cp_target_with_inexact_lookups_still_gets_all_blocks():
    class InRounds(WrapperStore):
        async def contains(self, keys):
            async def has(key):
                return (await self.inner.contains([key]))[0]

            return await look_up_in_rounds(keys, has, at_once=EXACT_KEYS, rounds=3)

    origin, target = MemoryStore(), MemoryStore()
    for number in range(300):
        for each in (origin, target)[: 1 + number % 2]:
            await each.put(key_of(number), block_of(number))
    missing = lacking(origin.list_blocks(), InRounds(target), lambda blocks: None)
    assert {key async for key in missing} == {key_of(number) for number in range(0, 300, 2)}


def test_store_cp_to_a_full_store_stops_with_one_error_line(root, tmp_path, capsys):
    target = f"file://{tmp_path}/full?min_free=999PB"
    assert store("cp", url_of(root), target) == 1
    captured = capsys.readouterr()
    assert "more would evict blocks" in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out.splitlines()[1].split()[0] == "0"


def test_store_tools_on_a_file_system_without_a_size_know_no_limit(
    root, tmp_path, capsys, monkeypatch
):
    Disk(monkeypatch).lose_its_size()
    target = url_of(tmp_path / "copy")
    assert told(capsys, "cp", url_of(root), target)["copied"] == 4
    assert told(capsys, "stat", target)["stores"][0]["disk_free_bytes"] is None
    assert store("bench", target, "--sizes", "8KiB", "--depths", "1", "--bytes", "64KiB") == 0


def test_store_cp_to_a_store_with_a_capacity_evicts_none_of_its_blocks(tmp_path, capsys):
    large = BlockLayout.plain(1, (("k", (1 << 20,)),), "uint8", 1)
    big = BlockFrame(Namespace((("layout", large.describe()),)), large)

    async def fill_origin():
        async with closing(FileSource(tmp_path / "from").open(big, depth=1)) as origin:
            for name in range(40):
                await origin.put(key_of(name), block_of(name, large))

    asyncio.run(fill_origin())
    fill(tmp_path / "to", BOB, *range(60))
    target = f"{url_of(tmp_path / 'to')}&capacity=30MB"
    answer = told(capsys, "cp", url_of(tmp_path / "from"), target, status=1)
    assert answer["full"]
    assert 0 < answer["copied"] == len(held(tmp_path / "to", big)) < 30
    assert len(held(tmp_path / "to", BOB)) == 60
    assert store("cp", url_of(tmp_path / "from"), target.replace("30MB", "80MB")) == 0
    assert len(held(tmp_path / "to", big)) == 40


# ---- mistakes ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "file:///no/such/folder"], "there is no such folder"),
        (["verify", "file:///no/such/folder?bandwidth=1GB/s"], "there is no such folder"),
        (["cp", "file:///no/such/folder", "file:///tmp/x"], "there is no such folder"),
        (["stat", "gopher://x"], "unknown scheme"),
        (["ls", "/nvme/kv"], "write for example file:///absolute/path"),
        (["ls", "{root}", "zz"], "no namespace starts with 'zz'"),
        (["verify", "{root}", "--namespace", "zz"], "no namespace starts with 'zz'"),
        (["clear", "{root}", "--namespace", "zz", "--yes"], "no namespace starts with 'zz'"),
        (["ls", "{root}", ""], "the digest of the namespace is empty"),
        (["clear", "{root}", "--namespace", "", "--yes"], "the digest of the namespace is empty"),
        (["gc", "{root}", "--to", "lots"], "--to: 'lots' is not a size"),
        (["cp", "{root},http://127.0.0.1:1", "{root}"], "names 2 stores, write one"),
        (["cp", "{root}", "{root},http://127.0.0.1:1"], "names 2 stores, write one"),
        (["ls", "file:///" + "a" * 5000], "File name too long"),
        (["bench", "{root}", "--model-config", "a" * 5000], "describes no model"),
        (["cp", "{root}", "memory://1GB"], "memory://1GB is memory of the server"),
        (["stat", "memory://1GB"], "memory://1GB is memory of the server"),
        (["clear", "{root},memory://1GB", "--yes"], "memory://1GB is memory of the server"),
        (["bench", "{root},http://127.0.0.1:1"], "names 2 stores, write one"),
        (["bench", "{root}", "--sizes", "1"], "--sizes: 1: blocks are measured from 4 KiB"),
        (["bench", "{root}", "--sizes", "2GiB"], "blocks are measured from 4 KiB to 1 GiB"),
        (["bench", "{root}", "--sizes", "x"], "--sizes: 'x' is not a size"),
        (["bench", "{root}", "--depths", "0"], "--depths: '0' is not a number from 1 to 256"),
        (["bench", "{root}", "--depths", "1,"], "--depths: '' is not a number"),
        (["bench", "{root}", "--bytes", "-1"], "--bytes: '-1' is not a size"),
        (["bench", "{root}", "--kv-bytes-per-token", "0"], "write a number of bytes"),
        (["bench", "{root}", "--kv-bytes-per-token", "1"], "a block of this model: blocks are"),
        (["bench", "{root}", "--block-tokens", "0"], "--block-tokens"),
        (["bench", "{root}", "--prefill-tokens-per-s", "5"], "of which model?"),
        (["bench", "{root}", "--prefill-tokens-per-s", "nan"], "write a number of tokens"),
        (["bench", "{root}", "--model-config", "/no/such/file"], "describes no model"),
    ],
)
def test_store_tools_invalid_arguments_are_one_line_and_exit_status_2(
    root, capsys, arguments, message
):
    assert store(*(part.replace("{root}", url_of(root)) for part in arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sglang-cake: ")
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


def test_store_tools_missing_folder_is_refused_and_not_created(tmp_path):
    for tool in (["ls"], ["stat"], ["verify"], ["gc"], ["clear", "--yes"], ["bench"]):
        assert store(*tool, url_of(tmp_path / "typo")) == 2
    assert list(tmp_path.iterdir()) == []


# ---- real processes ----


def environment():
    """With a buffer of stdout, as in a shell, whatever the variables of the tests."""
    path = Path(sglang_cake.__file__).parent.parent
    return os.environ | {"PYTHONPATH": str(path), "PYTHONUNBUFFERED": ""}


def process(*arguments, program=("-m", "sglang_cake"), **options):
    return subprocess.Popen(
        [sys.executable, *program, "store", *map(str, arguments)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


WRITER = """
import asyncio, sys
from storetools import ALICE, url_of
from sglang_cake.stores.open_store import parse_sources
from sglang_cake.testing.store_contract import block_of, key_of
async def main():
    store = parse_sources(url_of(sys.argv[1]))[0].open(ALICE, depth=2)
    count = 0
    while not sys.stdin.closed:
        name = f"live {count % 200}"
        await store.put(key_of(name), block_of(name))
        if count % 7 == 0:
            await store.delete(key_of(f"live {(count - 50) % 200}"))
        count += 1
        if count == 20:
            print("begun", flush=True)
        if count % 50 == 0 and not await asyncio.to_thread(alive):
            break
    await store.close()
    print(count, flush=True)
import select
def alive():
    return not select.select([sys.stdin], [], [], 0)[0]
asyncio.run(main())
"""


def test_store_tools_during_writes_of_another_process_succeed(root, tmp_path, capsys):
    folders = [environment()["PYTHONPATH"], *map(str, Path(__file__).parents[:2])]
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
    )
    try:
        assert writer.stdout.readline() == "begun\n"
        for _ in range(3):
            until(
                lambda: told(capsys, "stat", url_of(root))["stores"][0]["blocks"] >= 20,
                "it writes",
            )
            (answer,) = told(capsys, "verify", url_of(root))["stores"]
            assert answer["corrupt"] == answer["unanswered"] == 0
            assert answer["ok"] >= 4
            assert told(capsys, "cp", url_of(root), url_of(tmp_path / "to"))["corrupt"] == 0
            assert told(capsys, "ls", url_of(root))["stores"][0]["namespaces"]
            # The index alone takes more, so every block is evicted.
            told(capsys, "gc", url_of(root), "--to", 30 * FRAMED, status=1)
        told(capsys, "clear", url_of(root), "--namespace", ALICE.digest.hex(), "--yes")
        assert writer.poll() is None, "it noticed nothing"
        out, _ = writer.communicate("stop", timeout=60)
        assert int(out) >= 20
        assert writer.returncode == 0
    finally:
        writer.kill()
        writer.wait()
    assert told(capsys, "verify", url_of(tmp_path / "to"))["stores"][0]["ok"] > 0


def test_store_ls_with_a_closed_output_pipe_ends_quietly(tmp_path):
    fill(tmp_path, ALICE, *range(2000))
    with process("ls", url_of(tmp_path), ALICE.digest.hex()[:4]) as listing:
        listing.stdout.readline()
        listing.stdout.close()
        assert listing.wait(60) == PIPE_STATUS
        assert listing.stderr.read() == ""


def test_store_verify_without_a_terminal_shows_no_progress_bar(root):
    with process("verify", url_of(root)) as verifying:
        out, err = verifying.communicate(timeout=60)
    assert verifying.returncode == 0
    assert err == ""
    assert "OK" in out


def test_store_verify_on_a_terminal_shows_progress_and_clean_json(root):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with os.fdopen(ours, "rb", buffering=0) as screen:
        verifying = subprocess.run(
            [sys.executable, "-m", "sglang_cake", "store", "verify", url_of(root), "--json"],
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=environment(),
            timeout=60,
        )
        assert select.select([screen], [], [], 60)[0]
        assert b"verifying" in screen.read(4096)
        os.close(theirs)
    assert json.loads(verifying.stdout)["stores"][0]["ok"] == 4


def test_store_tools_sigterm_ends_a_tool_that_does_not_await():
    former = signal.getsignal(signal.SIGTERM)
    go = threading.Event()

    async def tool(args):
        os.kill(os.getpid(), signal.SIGTERM)
        go.wait()
        return 0

    with pytest.raises(KeyboardInterrupt):
        run_tool(tool)(None)
    assert signal.getsignal(signal.SIGTERM) is former
    go.set()


HANGING = """
import os, socket, sys, threading
from sglang_cake.cli import main, named_stores
from sglang_cake.stores.file import file_store  # imports, before the disk hangs

def hang(*args, **options):
    print("hangs", file=sys.stderr, flush=True)
    while True:
        threading.Event().wait()

named_stores.NOTICE_S = 0.01
{call} = hang
sys.exit(main())
"""


def hanging_process(call, *arguments):
    """A tool, after `call` has been called, which never returns, as on a dead disk."""
    tool = process(
        *arguments,
        program=("-c", HANGING.format(call=call)),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert tool.stderr.readline() == "hangs\n"
    return tool


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=lambda sent: sent.name)
@pytest.mark.parametrize(
    ("call", "remote"),
    [("socket.getaddrinfo", True), ("os.scandir", False), ("file_store.check_ours", False)],
    ids=["name server", "disk, in a thread", "disk, in the loop"],
)
def test_store_ls_interrupted_while_a_call_hangs_ends(root, sent, call, remote):
    with hanging_process(call, "ls", "http://kv-host" if remote else url_of(root)) as listing:
        try:
            listing.send_signal(sent)
            _, err = listing.communicate(timeout=60)
        finally:
            listing.kill()
    assert (listing.returncode, err) == (130, "interrupted\n")


def test_store_ls_interrupted_without_a_reader_of_its_errors_ends(root):
    """As with `2>&1 | tee`, which the same Ctrl-C ends."""
    with hanging_process("os.scandir", "ls", url_of(root)) as listing:
        try:
            listing.stderr.close()
            listing.send_signal(signal.SIGINT)
            assert listing.wait(60) == 130
        finally:
            listing.kill()


PRINTING = """
import sys
from sglang_cake.cli import main, named_stores

def fill(named):
    print("prints", file=sys.stderr, flush=True)
    print("x" * (1 << 20))

named_stores.refuse_memory = fill
sys.exit(main())
"""


def test_store_ls_interrupted_while_nobody_reads_its_output_ends(root):
    with process(
        *("ls", url_of(root)),
        program=("-c", PRINTING),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as listing:
        try:
            assert listing.stderr.readline() == "prints\n"
            listing.send_signal(signal.SIGINT)
            assert listing.wait(60) == 130
            assert listing.stderr.read() == "interrupted\n"
        finally:
            listing.kill()


def test_store_tool_interrupted_before_its_thread_runs_ends(monkeypatch):
    monkeypatch.setattr(named_stores, "LOOP_S", 0.01)

    def no_thread(pool, work):
        os.kill(os.getpid(), signal.SIGTERM)
        return Future()

    monkeypatch.setattr(named_stores, "submit", no_thread)
    with pytest.raises(KeyboardInterrupt):
        run_tool(None)(None)


def test_store_verify_interrupted_twice_leaves_reads_that_hang(root):
    with hanging_process("os.preadv", "verify", url_of(root), "--depth", "1") as verifying:
        try:
            verifying.send_signal(signal.SIGINT)
            assert verifying.stderr.readline() == (
                "calls to the store have not ended: Ctrl-C ends without them\n"
            )
            verifying.send_signal(signal.SIGINT)
            _, err = verifying.communicate(timeout=60)
        finally:
            verifying.kill()
    assert (verifying.returncode, err) == (130, "interrupted\n")


@contextlib.contextmanager
def on_a_terminal(*command):
    """A process with a terminal, and what the terminal shows."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with os.fdopen(ours, "rb", buffering=0) as screen:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdin=theirs,
            stderr=theirs,
            env=environment(),
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(theirs)
        try:
            yield process, screen
        finally:
            process.kill()
            process.wait()


def test_store_ls_interrupted_on_a_terminal_clears_its_line(root):
    hanging = HANGING.format(call="file_store.check_ours")
    with on_a_terminal("-c", hanging, "store", "ls", url_of(root)) as (listing, screen):
        assert b"hangs" in screen.read(4096)
        listing.send_signal(signal.SIGINT)
        assert listing.wait(60) == 130
        assert screen.read(4096).endswith(b"\r\x1b[Kinterrupted\r\n")


def test_store_clear_interrupted_at_its_question_deletes_nothing(root):
    before = files_of(root)
    command = ("-m", "sglang_cake", "store", "clear", url_of(root))
    with on_a_terminal(*command) as (clearing, screen):
        assert b"[y/N] " in screen.read(4096)
        clearing.send_signal(signal.SIGINT)
        assert clearing.wait(60) == 130
        assert screen.read(4096) == b"\r\x1b[Kinterrupted\r\n"
    assert files_of(root) == before


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=lambda sent: sent.name)
def test_store_bench_interrupted_removes_its_blocks(root, sent):
    before = sorted(root.rglob("*"))
    url = f"file://{root}?min_free=0&bandwidth=1kB/s"
    with process(
        *("bench", url, "--sizes", "64KiB", "--depths", "2", "--bytes", "64KiB"),
        # Whoever runs the tests in the background of a shell has them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as bench:
        try:
            blocks = "*/??/??/" + "?" * 64
            until(
                lambda: bench.poll() is not None or len(list(root.glob(blocks))) >= 8,
                "it has put four blocks, and reads",
            )
            bench.send_signal(sent)
            _, err = bench.communicate(timeout=60)
        finally:
            bench.kill()
    assert bench.returncode == 130
    assert err == "interrupted\n"
    assert sorted(root.rglob("*")) == before
