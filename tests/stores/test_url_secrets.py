"""What a user writes as a store: no secret of it is shown, and no store is named twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.cli import main
from sglang_cake.config import resolve
from sglang_cake.core.errors import ConfigError
from sglang_cake.stores.open_store import parse_sources
from sglang_cake.stores.url import redacted, split_urls

SECRET = "hunter2"
WITH_A_SECRET = [
    f"http://user:{SECRET}@host",
    f"http://{SECRET}@host",
    f"http://user:{SECRET}@host:none",
    f"http://user:{SECRET}/w@host",
    f"http://user:{SECRET}?w@host",
    f"http://user:{SECRET}@x@host",
    f"http://user:{SECRET},w@host",
    f"file:///kv,http://user:{SECRET}@host",
    f"user:{SECRET}@host",
    f"ftp://user:{SECRET}@host",
    f"s3://key:{SECRET}@bucket/kv",
    f"s3://bucket?endpoint=http://key:{SECRET}@host",
    f"s3://bucket?endpoint=http://key:{SECRET}@host:none",
    f"s3://bucket?endpoint=http%3A%2F%2Fkey%3A{SECRET}%40host%3Anone",
    f"s3://bucket?secret_access_key={SECRET}",
    f"http://host?password={SECRET}",
    f"http://host?token={SECRET}&token={SECRET}",
    f"file:///kv?Password={SECRET}",
]


@pytest.mark.parametrize("text", WITH_A_SECRET)
def test_store_url_refused_text_is_shown_without_its_secret(text, capsys):
    with pytest.raises(ConfigError) as error:
        parse_sources(text)
    assert SECRET not in str(error.value)
    assert "***" in str(error.value)
    assert "\n" not in str(error.value)
    assert main(["store", "ls", text]) == 2
    assert SECRET not in capsys.readouterr().err
    with pytest.raises(ConfigError) as error:
        resolve({"store": text}, {}, spell=str)
    assert SECRET not in str(error.value)


@given(st.text(alphabet="ab@:%,1", min_size=1, max_size=12))
def test_redacted_url_with_any_password_hides_it(password):
    text = f"http://user:QQ{password}QQ@host"
    assert "QQ" not in redacted(text)
    with pytest.raises(ConfigError) as error:
        parse_sources(text)
    assert "QQ" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "file:///data/@kv?capacity=1GB",
        "http://host:8700/a?token_file=/etc/token&ca=/etc/ca",
        "file:///kv?key_file=/etc/key,http://host:8700",
        "s3://bucket/kv?endpoint=http://10.0.0.7:9000&region=us-east-1",
        "mooncake://10.0.0.1:50051?segment=4GB",
    ],
)
def test_redacted_url_without_a_secret_is_unchanged(text):
    assert redacted(text) == text


TWICE = [
    "file:///kv,file:///kv",
    "file:///kv,file:///kv/",
    "file:///kv,file://///kv?capacity=1GB",
    "file:///a%20b,file:///a b",
    "file:///fast,file:///kv,file:///kv",
    "http://host:8700,http://HOST:8700/",
    "s3://bucket/kv,s3://bucket/kv?region=eu-west-3",
    "s3://bucket/kv?endpoint=http://h:1,s3://bucket/kv/?endpoint=http://h:1/",
]


@pytest.mark.parametrize("text", TWICE)
def test_store_url_with_the_same_store_twice_is_refused(text):
    with pytest.raises(ConfigError, match="is named twice: name each store once"):
        parse_sources(text)


@pytest.mark.parametrize(
    "text",
    [
        "file:///kv,file:///KV",
        "file:///kv,file:///kv/inner",
        "http://host:8700,http://host:8701",
        "http://host/a,http://host/A",
        "s3://bucket/kv?endpoint=http://h:1,s3://bucket/kv?endpoint=http://h:2",
    ],
)
def test_split_urls_with_different_stores_accepts_them(text):
    assert len(split_urls(text)) == 2
