"""Traces of requests: the blocks and the time of each prompt.

Three formats of JSON lines, distinguished by their fields, plain or zstd-compressed (`.zst`):

- Mooncake: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (512-token blocks);
- Qwen-Bailian ("KVCache Cache in the Wild"): `chat_id`, `parent_chat_id`, `timestamp` (s), `type`,
  `turn`, `hash_ids` (16-token blocks), and the lengths;
- cake's (`--cake-record-trace`): `t_s`, `input_length`, `block_tokens`, `hash_ids`, `workload`.

`hash_ids` name a block together with everything before it, so equal ids mean equal prefixes.
A line of cake's format may be broken off, by a full disk or the end of the server, and is skipped.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import zstandard

from sglang_cake.core.errors import ConfigError

MOONCAKE_BLOCK_TOKENS, BAILIAN_BLOCK_TOKENS = 512, 16
_READ_BYTES = 1 << 20
_RECORDED = '{"t_s": '  # how each line of cake's format begins


@dataclass(frozen=True, slots=True)
class TraceRequest:
    at_s: float  # never before that of the previous request in the file
    tokens: int
    blocks: tuple[int, ...]
    workload: str = ""  # as the trace states
    turn: int | None = None  # of the conversation, as the trace states


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of the file."""

    block_tokens: int
    requests: tuple[TraceRequest, ...]
    broken_off: tuple[int, ...] = ()  # numbers of the lines that were skipped

    @property
    def refs(self) -> int:
        """References to blocks."""
        return sum(len(request.blocks) for request in self.requests)


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises: ConfigError, which names the file and the wrong line."""
    requests: list[TraceRequest] = []
    broken_off: list[int] = []
    block_tokens, last_s = 0, 0.0
    try:
        with _opened(path) as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    size, request = _request(json.loads(line), last_s)
                except json.JSONDecodeError as error:
                    if not _RECORDED.startswith(line.rstrip("\n")[: len(_RECORDED)]):
                        raise ConfigError(f"{path}, line {number}: {error}") from None
                    broken_off.append(number)
                    continue
                except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
                    raise ConfigError(f"{path}, line {number}: {_reason(error)}") from None
                if block_tokens not in (0, size):
                    raise ConfigError(f"{path}, line {number}: blocks of another size")
                block_tokens, last_s = size, request.at_s
                requests.append(request)
    except (OSError, UnicodeDecodeError, zstandard.ZstdError) as error:
        raise ConfigError(f"trace {path} cannot be read: {error}") from None
    if not requests:
        raise ConfigError(f"trace {path} has no requests")
    return Trace(block_tokens, tuple(requests), tuple(broken_off))


def _opened(path: Path) -> TextIO:
    if path.suffix != ".zst":
        return path.open(encoding="utf-8")
    text = io.BytesIO()
    decoder = zstandard.ZstdDecompressor().decompressobj()
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            while part:
                if decoder.eof:  # another frame follows
                    decoder = zstandard.ZstdDecompressor().decompressobj()
                text.write(decoder.decompress(part))
                part = decoder.unused_data
    if not decoder.eof:  # `zstandard.open` takes such a file for a whole one
        raise ConfigError(f"trace {path} is cut: its end is missing")
    text.seek(0)
    return io.TextIOWrapper(text, encoding="utf-8")


def _request(line: Any, last_s: float) -> tuple[int, TraceRequest]:
    """(block size, request). Raises: ValueError, KeyError, TypeError."""
    if not isinstance(line, dict):
        raise ValueError("not a JSON object")
    tokens, blocks = line["input_length"], line["hash_ids"]
    turn = None
    if "t_s" in line:
        at_s, size, workload = line["t_s"], line["block_tokens"], line.get("workload", "")
    elif "chat_id" in line:
        at_s, size, workload = line["timestamp"], BAILIAN_BLOCK_TOKENS, line["type"]
        turn = line["turn"]
    else:
        at_s, size, workload = line["timestamp"] / 1000, MOONCAKE_BLOCK_TOKENS, ""
    whole = [tokens, size, *([] if turn is None else [turn]), *blocks]
    if not all(type(number) is int and 0 <= number < 2**64 for number in whole) or not size:
        raise ValueError("lengths, turns and hash_ids are whole numbers of at most 64 bits")
    if not isinstance(workload, str) or type(at_s) not in (int, float):
        raise ValueError("a type is text, and a time a number")
    workload.encode()  # JSON may hold half a surrogate pair: a ValueError
    if len(set(blocks)) != len(blocks):
        raise ValueError("one prompt cannot have the same hash_id twice")
    if not len(blocks) - 1 <= tokens / size <= len(blocks) + 1:
        raise ValueError(f"{len(blocks)} blocks of {size} tokens are not {tokens} tokens")
    return size, TraceRequest(max(float(at_s), last_s), tokens, tuple(blocks), workload, turn)


def _reason(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def next_uses(trace: Trace) -> Iterator[tuple[int, ...]]:
    """For each request, and each of its blocks, the index of the next request that uses it; the
    number of requests if none does."""
    never = len(trace.requests)
    seen: dict[int, int] = {}
    uses: list[tuple[int, ...]] = []
    for index in range(never - 1, -1, -1):
        blocks = trace.requests[index].blocks
        uses.append(tuple(seen.get(block, never) for block in blocks))
        for block in blocks:
            seen[block] = index
    return reversed(uses)
