"""The S3 store against a real S3 server in a process of its own."""

import asyncio
import gc
import json
import warnings

import pytest
from botocore.exceptions import ClientError
from filestore import closing
from moto_process import PATIENT, moto
from storetools import refusal_in_new_process, refusal_of, write_key_file

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.errors import (
    BlockCorrupt,
    BlockMissing,
    ConfigError,
    StoreError,
    StoreUnavailable,
)
from sglang_cake.core.keys import Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.stores.open_store import parse_sources
from sglang_cake.stores.s3.bucket import S3Bucket, S3Error
from sglang_cake.stores.s3.s3_store import (
    DESCRIPTION_TRIES,
    LOOKUPS_AT_ONCE,
    READ_BYTES,
    S3Store,
)
from sglang_cake.testing.store_contract import (
    FRAME,
    LAYOUT,
    NAMESPACE,
    ProgressRecord,
    StoreContract,
    block_of,
    key_of,
    read,
)

A, B = key_of("a"), key_of("b")
LARGE = BlockLayout.plain(
    layers=1, parts=(("kv", (4096,)),), dtype="float32", block_tokens=256
)  # 4 MiB
LARGE_FRAME = BlockFrame(NAMESPACE, LARGE)


def forget_credentials(monkeypatch, tmp_path):
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(autouse=True)
def credentials(monkeypatch, tmp_path):
    forget_credentials(monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anyone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "anything")


@pytest.fixture(scope="module")
def server():
    with moto(MOTO_S3_DEFAULT_MAX_KEYS="3") as server:  # a page of a listing
        yield server


@pytest.fixture
def bucket(server):
    return server.make_bucket()


def path_of(place, key, frame=FRAME):
    name = key.hex()
    return f"{place}/{frame.digest.hex()}/{name[:2]}/{name[2:4]}/{name}"


class TestS3Store(StoreContract):
    @pytest.fixture(autouse=True)
    def served(self, server):
        self.server = server

    def open(self, folder):
        return self.server.open(self.server.make_bucket() + "/kv/blocks", frame=self.frame)


class TestSealedS3Store(TestS3Store):
    """With `key_file=`: encrypted before they leave this machine. In a whole bucket, one call at a
    time."""

    tells_progress = False

    def open(self, folder):
        options = f"&key_file={write_key_file(folder)}"
        return self.server.open(
            self.server.make_bucket(), frame=self.frame, options=options, depth=1
        )


async def test_s3_store_sealed_block_leaves_no_plain_bytes_in_the_bucket(server, bucket, tmp_path):
    async with closing(
        server.open(bucket, options=f"&key_file={write_key_file(tmp_path)}")
    ) as store:
        await store.put(A, block_of("a"))
    names = [item["Key"] for item in server.client.list_objects_v2(Bucket=bucket)["Contents"]]
    (name,) = (name for name in names if name.endswith(A.hex()))
    assert bytes(block_of("a"))[:64] not in server.read(f"{bucket}/{name}")
    assert FRAME.digest.hex() not in name


async def test_s3_store_objects_are_at_the_documented_paths(server, bucket):
    async with closing(server.open(f"{bucket}/some%20where/")) as store:
        await store.put(A, block_of("a"))
    place = f"{bucket}/some where"
    data = bytes(block_of("a"))
    assert server.read(path_of(place, A)) == FRAME.header(A, data) + data
    described = json.loads(server.read(f"{place}/{FRAME.digest.hex()}/namespace.json"))
    assert described == NAMESPACE.describe()


async def test_s3_source_namespaces_are_those_of_stored_blocks(server, bucket):
    other = BlockFrame(Namespace((("model", "another"),)), LAYOUT)
    source = server.source(f"{bucket}/kv")
    assert await source.namespaces() == []
    for frame in (FRAME, other):
        async with closing(source.open(frame, depth=1)) as store:
            await store.put(A, block_of("a"))
    server.write(f"{bucket}/kv/{other.digest.hex()}/namespace.json", b"[1, {")
    server.write(f"{bucket}/kv/else/where", b"")
    server.write(f"{bucket}/else", b"")
    found = await source.namespaces()
    assert {namespace.digest: namespace.fields for namespace in found} == {
        FRAME.digest: NAMESPACE.describe(),
        other.digest: {},
    }


@pytest.mark.parametrize("failures", [1, DESCRIPTION_TRIES])
async def test_s3_source_description_that_cannot_be_read_now_is_not_taken_for_none(
    server, bucket, monkeypatch, failures
):
    source = server.source(f"{bucket}/kv")
    async with closing(source.open(FRAME, depth=1)) as store:
        await store.put(A, block_of("a"))
    reading, left = S3Bucket.reading, [StoreUnavailable("no answer in 2.0 s")] * failures

    def late(self, name, size_bytes):
        if left:
            raise left.pop()
        return reading(self, name, size_bytes)

    monkeypatch.setattr(S3Bucket, "reading", late)
    if failures < DESCRIPTION_TRIES:
        (found,) = await source.namespaces()
        assert found.fields == NAMESPACE.describe()
    else:
        with pytest.raises(StoreUnavailable, match="no answer"):
            await source.namespaces()


async def test_s3_source_description_that_is_refused_hides_no_other_namespace(
    server, bucket, monkeypatch
):
    other = BlockFrame(Namespace((("model", "another"),)), LAYOUT)
    source = server.source(f"{bucket}/kv")
    for frame in (FRAME, other):
        async with closing(source.open(frame, depth=1)) as store:
            await store.put(A, block_of("a"))
    reading = S3Bucket.reading
    archived = {
        "Error": {"Code": "InvalidObjectState"},
        "ResponseMetadata": {"HTTPStatusCode": 403},
    }

    def refusing(self, name, size_bytes):
        if other.digest.hex() in name:
            raise S3Error(ClientError(archived, "GetObject"))
        return reading(self, name, size_bytes)

    monkeypatch.setattr(S3Bucket, "reading", refusing)
    found = {namespace.digest: namespace.fields for namespace in await source.namespaces()}
    assert found == {FRAME.digest: NAMESPACE.describe(), other.digest: {}}


async def test_s3_store_listing_spans_pages_and_skips_foreign_objects(server, bucket):
    place = f"{bucket}/kv"
    wrong = path_of(place, A).replace(f"/{A.hex()[:2]}/", "/zz/")
    for path in (wrong, f"{place}/{FRAME.digest.hex()}/readme", f"{bucket}/kv2/x"):
        server.write(path, b"foreign")
    async with closing(server.open(place)) as store:
        await asyncio.gather(*(store.put(key_of(n), block_of(n)) for n in range(8)))
        listed = {block.key: block async for block in store.list_blocks()}
    assert listed.keys() == {key_of(n) for n in range(8)}
    assert {block.stored_bytes for block in listed.values()} == {FRAME.framed_bytes}
    assert all(block.used_s is not None for block in listed.values())


# What may have happened to an object, and what must be noticed.
DAMAGE = {
    "a flipped bit": lambda raw: raw[:5000] + bytes([raw[5000] ^ 1]) + raw[5001:],
    "a flipped bit in the header": lambda raw: bytes([raw[0] ^ 1]) + raw[1:],
    "cut off": lambda raw: raw[:-1],
    "too long": lambda raw: raw + b"\0",
    "empty": lambda raw: b"",
    "zeros": lambda raw: bytes(len(raw)),
    "another block": lambda raw: FRAME.header(B, block_of("b")) + bytes(block_of("b")),
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_s3_store_damaged_object_is_removed_and_can_be_put_again(server, bucket, damage):
    async with closing(server.open(bucket)) as store:
        await store.put(A, block_of("a"))
        raw = FRAME.header(A, block_of("a")) + bytes(block_of("a"))
        server.write(path_of(bucket, A), DAMAGE[damage](raw))
        with pytest.raises(BlockCorrupt):
            await read(store, A)
        with pytest.raises(BlockMissing):
            await read(store, A)
        assert await store.contains([A]) == [False]
        assert await store.put(A, block_of("a")) is True
        assert await read(store, A) == block_of("a")


async def test_s3_store_lookup_of_1000_keys_asks_for_few_objects(server, bucket):
    async with closing(server.open(bucket)) as store:
        names = range(1000)
        keys = [key_of(n) for n in names]
        await asyncio.gather(*(store.put(key_of(n), block_of(n)) for n in range(100)))
        before = store.events()["requests"]
        assert await store.contains(keys) == [n < 100 for n in names]
        assert store.events()["requests"] - before <= 2 * LOOKUPS_AT_ONCE


async def test_s3_store_cancelled_put_of_a_large_block_is_whole_or_absent(server, bucket):
    async with closing(server.open(bucket, LARGE_FRAME)) as store:
        data, outcomes = block_of("large", LARGE), set()
        for turns in (1, 20, 40, 60, 80, 100, 150, 10_000):
            key = key_of(turns)
            put = asyncio.create_task(store.put(key, data))
            for _ in range(turns):
                if put.done():
                    break
                await asyncio.sleep(0.0005)
            if turns < 10_000:  # the last one may take as long as it likes
                put.cancel()
            await asyncio.wait([put])
            there = (await store.contains([key]))[0]
            outcomes.add(put.cancelled())
            assert there or put.cancelled()
            if there:
                assert await read(store, key, LARGE) == data
        assert outcomes == {True, False}


async def test_s3_store_cancelled_read_leaves_buffer_and_next_reads_intact(server, bucket):
    async with closing(server.open(bucket, LARGE_FRAME, depth=1)) as store:
        data = block_of("large", LARGE)
        await store.put(A, data)
        for turns in (0, 1, 3, 5, 8, 12):
            out = bytearray(LARGE.block_bytes)
            get = asyncio.create_task(store.get_into(A, memoryview(out)))
            for _ in range(turns):
                await asyncio.sleep(0.0005)
            get.cancel()
            await asyncio.wait([get])
            out[:] = bytes(len(out))
            assert await read(store, A, LARGE) == data
            assert not any(out)


async def test_store_progress_of_a_large_read_grows_piece_by_piece(server, bucket):
    async with closing(server.open(bucket, LARGE_FRAME)) as store:
        data, out = block_of("large", LARGE), bytearray(LARGE.block_bytes)
        await store.put(A, data)
        told = ProgressRecord(out, data)
        await store.get_into(A, memoryview(out), told)
        assert told.wrong == []
        assert told.grew
        assert len(told.counts) > LARGE.block_bytes // READ_BYTES
        assert told.counts[-1] == LARGE.block_bytes


async def test_s3_store_many_parallel_calls_at_depth_two_all_succeed(server, bucket):
    async with closing(server.open(bucket, depth=2)) as store:
        names = range(60)
        await asyncio.gather(*(store.put(key_of(n), block_of(n)) for n in names))
        calls = [read(store, key_of(n)) for n in names]
        lookups = [store.contains([key_of(n) for n in names]) for _ in range(4)]
        *got, _, _, _, found = await asyncio.gather(*calls, *lookups)
        assert got == [block_of(n) for n in names]
        assert found == [True] * 60


async def test_s3_store_killed_server_is_unavailable_until_restarted():
    with moto() as server:
        place = server.make_bucket("again")

        async def outcome(call):
            try:
                return await call
            except StoreError as error:
                return error

        now_s = [0.0]
        given = {"depth": 4, "limits": PATIENT, "clock": lambda: now_s[-1]}
        async with closing(S3Store(server.source(place).place, LARGE_FRAME, **given)) as store:
            data = block_of("large", LARGE)
            await store.put(A, data)
            calls = [outcome(store.put(key_of(n), data)) for n in range(12)]
            calls += [outcome(read(store, A, LARGE)) for _ in range(12)]
            running = [asyncio.create_task(call) for call in calls]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            server.kill()
            answers = await asyncio.gather(*running)
            failed = [answer for answer in answers if isinstance(answer, StoreError)]
            assert failed
            assert all(isinstance(answer, StoreUnavailable) for answer in failed)
            assert all(answer == data for answer in answers if isinstance(answer, bytes))
            for call in (store.contains([A]), read(store, A, LARGE), store.put(B, data)):
                with pytest.raises(StoreUnavailable):
                    await call
            server.__init__(server.port)
            server.make_bucket(place)
            now_s.append(60.0)
            assert await store.contains([A]) == [False]
            assert await store.put(A, data) is True
            assert await read(store, A, LARGE) == data


async def test_s3_store_missing_bucket_is_unavailable(server):
    async with closing(server.open("nobody-made-this")) as store:
        for call in (read(store, A), store.put(A, block_of("a")), anext(store.list_blocks())):
            with pytest.raises(StoreUnavailable, match="NoSuchBucket"):
                await call


def test_s3_store_closed_leaves_no_open_connection(server, bucket, caplog):
    async def test(store):
        await asyncio.gather(*(store.put(key_of(n), block_of(n)) for n in range(8)))
        await read(store, key_of(0))

    def warned(close):
        async def main():
            store = server.open(bucket)
            await test(store)
            if close:
                await store.close()
                await store.close()

        gc.collect()  # what other tests left
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            asyncio.run(main())
            gc.collect()
        left = [w for w in caught if issubclass(w.category, ResourceWarning)]
        return left + [record for record in caplog.records if "nclosed" in record.message]

    assert warned(close=True) == []
    assert warned(close=False) != [], "this would not notice an open connection"


async def test_s3_store_never_used_closes_without_an_error(server):
    async with closing(server.open("nobody-made-this")):
        await asyncio.sleep(0)


def check_says(source):
    with pytest.raises(ConfigError) as error:
        source.check()
    assert "\n" not in str(error.value)
    return str(error.value)


async def test_s3_source_check_within_a_running_loop_passes(server, bucket):
    server.source(f"{bucket}/kv").check()


def test_s3_source_check_of_a_missing_bucket_names_it(server):
    said = check_says(server.source("nobody-made-this/kv"))
    assert f"bucket 'nobody-made-this' at {server.endpoint} does not exist" in said


def test_s3_source_check_without_credentials_is_one_error_line(
    server, bucket, monkeypatch, tmp_path
):
    forget_credentials(monkeypatch, tmp_path)
    assert "Unable to locate credentials" in check_says(server.source(bucket))


def test_s3_source_check_with_an_unknown_profile_names_it(server, bucket, monkeypatch, tmp_path):
    forget_credentials(monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert "profile (nobody) could not be found" in check_says(server.source(bucket))


async def test_s3_source_check_with_refused_credentials_says_so():
    with moto(INITIAL_NO_AUTH_ACTION_COUNT="0") as strict:
        said = check_says(strict.source("any-bucket"))
        async with closing(strict.open("any-bucket")) as store:
            for call in (store.contains([A]), read(store, A), store.put(A, block_of("a"))):
                with pytest.raises(StoreUnavailable):
                    await call
    assert "InvalidAccessKeyId; check the credentials" in said
    assert "anything" not in said


async def test_s3_source_check_with_the_server_down_passes(server):
    (source,) = parse_sources("s3://kv-bucket?endpoint=http://127.0.0.1:1&region=us-east-1")
    source.check()
    async with closing(source.open(FRAME, depth=1)) as store:
        with pytest.raises(StoreUnavailable):
            await store.contains([A])


def test_s3_url_without_aiobotocore_names_the_extra():
    refusal = refusal_in_new_process("s3://bucket/kv", "sys.modules['aiobotocore'] = None")
    assert refusal == (
        "store URL 's3://bucket/kv': needs aiobotocore: pip install 'sglang-cake[s3]'\n"
    )


def test_store_url_valid_text_is_parsed_into_its_source():
    (source,) = parse_sources(
        "s3://my.bucket-1/a/b%20c/?endpoint=https://s3.example:9000&region=eu-central-1"
    )
    place = source.place
    assert (place.bucket, place.prefix) == ("my.bucket-1", "a/b c")
    assert (place.endpoint, place.region) == ("https://s3.example:9000", "eu-central-1")
    (source,) = parse_sources("s3://bucket")
    assert (source.place.prefix, source.place.endpoint, source.place.region) == ("", None, None)
    assert source.place.name("x", "y") == "x/y"


BAD_URLS = {
    "s3://": "'' is not a bucket",
    "s3:///kv": "'' is not a bucket",
    "s3://Bucket/kv": "'Bucket' is not a bucket",
    "s3://my_bucket": "'my_bucket' is not a bucket",
    "s3://ab": "'ab' is not a bucket",
    "s3://key:secret@bucket/kv": "credentials do not belong there",
    "s3://bucket/a//b": "single slashes",
    "s3://bucket/a/../b": "single slashes",
    "s3://bucket/a%0Ab": "single slashes",
    "s3://bucket/" + 600 * "a": "longer than 512 bytes",
    "s3://bucket?endpoint=host:9000": "'endpoint': 'host:9000' is not an endpoint",
    "s3://bucket?endpoint=ftp://host": "'ftp://host' is not an endpoint",
    "s3://bucket?endpoint=http://host:a": "is not an endpoint",
    "s3://bucket?endpoint=http://k:s@host": "without credentials",
    "s3://bucket?region=Europe 1": "'Europe 1' is not a region",
    "s3://bucket?fsync=off": "'fsync': unknown key, allowed: bandwidth, endpoint",
}


@pytest.mark.parametrize("text", BAD_URLS)
def test_store_url_invalid_text_is_one_config_error_line(text):
    assert BAD_URLS[text] in refusal_of(text)
