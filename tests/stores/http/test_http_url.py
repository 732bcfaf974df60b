"""What may be written as the URL of an HTTP store, and who is let in."""

from pathlib import Path

import pytest
from http_servers import TOKEN, make_certificate, write_token
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.core.errors import ConfigError
from sglang_cake.stores.http.auth import AcceptedTokens, load_tokens
from sglang_cake.stores.http.http_store import HttpSource
from sglang_cake.stores.open_store import parse_sources


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://kv-host:8700", HttpSource("http://kv-host:8700")),
        ("http://kv-host:8700/", HttpSource("http://kv-host:8700")),
        ("http://kv-host/a/b/", HttpSource("http://kv-host/a/b")),
        ("http://[::1]:8700", HttpSource("http://[::1]:8700")),
        ("https://h?ca=/c", HttpSource("https://h", ca=Path("/c"))),
        ("https://h?token_file=/t%20x", HttpSource("https://h", token_file=Path("/t x"))),
    ],
)
def test_http_url_valid_text_is_parsed_into_its_source(url, expected):
    assert parse_sources(url) == [expected]


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("http://", "names no host"),
        ("http:///path", "names no host"),
        ("http://:8700", "names no host"),
        ("http://h:port", "ort"),
        ("http://h:99999", "ort"),
        ("http://[::1", "host or port"),
        ("http://kv..example.com:8700", "host or port"),
        ("http://user:secret@h", "token_file"),
        ("http://h/a b", "names no host"),
        ("http://h#x", "not a URL"),
        ("http://hé", "not a URL"),
        ("http://h?ca=/c", "https"),
        ("http://h?token_file=t", "absolute"),
        ("http://h?token=abc", "unknown key"),
        ("ftp://h", "allowed: file, http, https"),
    ],
)
def test_store_url_invalid_text_is_one_config_error_line(url, word):
    with pytest.raises(ConfigError) as error:
        parse_sources(url)
    assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_http_source_check_reads_files_without_a_server(tmp_path):
    (source,) = parse_sources("http://127.0.0.1:1")
    source.check()
    cert, _ = make_certificate(tmp_path)
    token = write_token(tmp_path)
    (source,) = parse_sources(f"https://127.0.0.1:1?ca={cert}&token_file={token}")
    source.check()
    (tmp_path / "none.pem").write_text("no certificate")
    for option, word in {
        f"ca={tmp_path}/none.pem": "ca file",
        f"ca={tmp_path}/absent": "ca file",
        f"token_file={tmp_path}/absent": "token file",
    }.items():
        (source,) = parse_sources(f"https://127.0.0.1:1?{option}")
        with pytest.raises(ConfigError, match=word):
            source.check()


def test_http_source_repr_hides_the_token(tmp_path):
    (source,) = parse_sources(f"http://h?token_file={write_token(tmp_path)}")
    assert TOKEN not in repr(source)


def token_file(tmp_path, text, mode=0o600):
    path = tmp_path / "tokens"
    path.write_bytes(text)
    path.chmod(mode)
    return path


def test_load_tokens_returns_one_token_per_line(tmp_path):
    path = token_file(tmp_path, b"\n" + b"a" * 16 + b"  \r\n\n" + b"b" * 40)
    assert load_tokens(path) == ["a" * 16, "b" * 40]


BAD_FILES = {
    "empty": (b"\n", 0o600, "no token"),
    "short": (b"a" * 15, 0o600, "at least 16"),
    "two words": (b"a" * 16 + b" b", 0o600, "no spaces"),
    "too long": ((b"a" * 64 + b"\n") * 1009, 0o600, "too long"),  # cut, it would have a short token
    "binary": (b"\xff" * 20, 0o600, "ASCII"),
    "group may read": (b"a" * 16, 0o640, "chmod 600"),
    "others may write": (b"a" * 16, 0o602, "chmod 600"),
}


@pytest.mark.parametrize(("text", "mode", "word"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_load_tokens_invalid_file_raises_without_showing_it(tmp_path, text, mode, word):
    with pytest.raises(ConfigError, match=word) as error:
        load_tokens(token_file(tmp_path, text, mode))
    assert "aaaa" not in str(error.value)


TOKENS = st.text("".join(map(chr, range(33, 127))), min_size=16, max_size=40)


@given(st.lists(TOKENS, min_size=1, max_size=4), TOKENS)
def test_gate_accepts_only_its_tokens(tokens, other):
    gate = AcceptedTokens(tokens)
    for token in tokens:
        assert gate.may_read(f"Bearer {token}")
        assert gate.may_read(f"bearer  {token} ")
        assert not gate.may_read(token)
        assert not gate.may_read(f"Bearer {token[:-1]}")
        assert gate.may_write(f"Bearer {token}")
    assert gate.may_read(f"Bearer {other}") == (other in tokens)
    reading = AcceptedTokens(tokens, [other])
    assert reading.may_read(f"Bearer {other}")
    assert reading.may_write(f"Bearer {other}") == (other in tokens)


@given(st.one_of(st.none(), st.text()))
def test_gate_random_header_without_a_token_is_rejected(header):
    assert not AcceptedTokens([TOKEN]).may_read(header)
    assert not AcceptedTokens([]).may_read(header)
