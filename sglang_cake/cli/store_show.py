"""`sglang-cake store ls`, `stat` and `describe`: the content of a store, and its layers."""

import argparse
import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from sglang_cake.cli.named_stores import (
    SHORT_DIGEST,
    NamedStore,
    add_url_and_json,
    blocks_in,
    complain,
    frame_of_stored,
    named_stores,
    namespaces_of,
    progress,
    readable,
    run_tool,
    stats_of,
    whole_digest,
)
from sglang_cake.cli.text_tables import count_text, printable, size_text, table, time_text
from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.codec_names import CHOICES, RAW, own_names
from sglang_cake.core.keys import LABEL, Digest
from sglang_cake.stores.base import StoredNamespace, StoreLayer
from sglang_cake.stores.file.disk import free_bytes
from sglang_cake.stores.open_store import describe_store, parse_sources


@dataclass(slots=True)
class NamespaceContent:
    """The blocks of one namespace, counted one by one."""

    blocks: int = 0
    bytes: int = 0
    last_used_s: float | None = None  # seconds since 1970


def add_ls(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "ls",
        help="list the namespaces of a store, or the blocks of one",
        description="List the namespaces of a store: whose KV is in it. "
        "With NAMESPACE, list its blocks; --json then prints one line for each.",
    )
    add_url_and_json(parser, run_tool(_ls))
    parser.add_argument("namespace", nargs="?", metavar="NAMESPACE", help="start of its digest")


def add_stat(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "stat", help="totals of a store", description="Totals of a store, and the room it has."
    )
    add_url_and_json(parser, run_tool(_stat))


def add_describe(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "describe",
        help="print the layers of a store, with their settings",
        description="Print the layers that a server puts between itself and a store, outermost "
        "first, with their settings. Opens and connects nothing.",
    )
    add_url_and_json(parser, _print_layers)
    choices = (*CHOICES, *own_names())
    parser.add_argument("--codec", choices=choices, default=RAW, help="of the server (%(default)s)")


def _print_layers(args: argparse.Namespace) -> int:
    found = describe_store(parse_sources(args.url), args.codec)
    print(json.dumps(asdict(found), default=str) if args.json else "\n".join(_layer_lines(found)))
    return 0


def _layer_lines(layer: StoreLayer, indent: str = "") -> list[str]:
    settings = [_setting_text(name, value) for name, value in layer.settings.items()]
    lines = ["  ".join([indent + layer.layer, *filter(None, settings)])]
    for inner in layer.inner:
        lines += _layer_lines(inner, indent + "  ")
    return lines


def _setting_text(name: str, value: object) -> str:
    """`name=value`; empty for a setting that is not set."""
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        value = "on" if value else "off"
    elif isinstance(value, int | float) and name.endswith("_bytes_per_s"):
        name = name.removesuffix("_bytes_per_s")
        value = f"{size_text(value)}/s"
    elif isinstance(value, int | float) and name.endswith("_bytes"):
        name = name.removesuffix("_bytes")
        value = size_text(value)
    return f"{name}={value}"


async def _ls(args: argparse.Namespace) -> int:
    listed, status = [], 0
    stores = named_stores(args.url)
    digest = await whole_digest(stores, args.namespace)
    for named in stores:
        if digest is not None:
            status |= await _list_blocks(named, digest, as_json=args.json)
            continue
        found = [await _describe(named, stored) for stored in await namespaces_of(named)]
        listed.append({"url": named.url, "namespaces": found})
        if not args.json:
            print(_namespace_table(named, found))
    if args.json and digest is None:
        print(json.dumps({"stores": listed}))
    return status


async def _describe(named: NamedStore, stored: StoredNamespace) -> dict[str, Any]:
    row: dict[str, Any] = {"namespace": stored.digest.hex(), "fields": stored.fields}
    try:
        frame = frame_of_stored(stored)
    except ValueError as error:
        return row | {"unreadable": str(error)}
    return row | asdict(await count(named, frame))


async def count(named: NamedStore, frame: BlockFrame) -> NamespaceContent:
    """Look at every block of a namespace. Raises: StoreUnavailable."""
    content = NamespaceContent()
    with progress("counting") as bar:
        async for block in blocks_in(named, frame):
            content.blocks += 1
            content.bytes += block.stored_bytes
            if block.used_s is not None:
                content.last_used_s = max(content.last_used_s or 0.0, block.used_s)
            bar.update(1)
    return content


def _namespace_table(named: NamedStore, found: list[dict[str, Any]]) -> str:
    if not found:
        return f"{named.url}: empty"
    rows = []
    for each in found:
        fields, digest = each["fields"], each["namespace"][:SHORT_DIGEST]
        if "unreadable" in each:
            rows.append([digest, f"(unreadable: {each['unreadable']})", "-", "-", "-", "-", "-"])
            continue
        rank = fields.get("head_group", fields.get("tp_rank", "-"))
        size = fields.get("head_groups", fields.get("tp_size", "-"))
        rows.append(
            [
                digest,
                printable(fields.get(LABEL, "-")),
                json.loads(fields["layout"])["dtype"],
                printable(rank if rank == size == "-" else f"{rank}/{size}", 12),
                count_text(each["blocks"]),
                size_text(each["bytes"]),
                time_text(each["last_used_s"]),
            ]
        )
    heads = ["NAMESPACE", "MODEL", "DTYPE", "TP RANK", "BLOCKS", "BYTES", "LAST USED"]
    return f"{named.url}\n" + table(heads, rows, right=(4, 5))


async def _list_blocks(named: NamedStore, digest: Digest, *, as_json: bool) -> int:
    good, bad = await readable(named, digest)
    complain(named, bad)
    for _, frame in good:
        if not as_json:
            print(f"{'KEY':64}  {'BYTES':>12}  LAST USED")
        async for block in blocks_in(named, frame):
            if as_json:
                row = {"key": block.key.hex(), "bytes": block.stored_bytes}
                print(json.dumps(row | {"last_used_s": block.used_s}))
            else:
                used = time_text(block.used_s)
                print(f"{block.key.hex()}  {block.stored_bytes:>12,}  {used}")
    return 1 if bad else 0


async def _stat(args: argparse.Namespace) -> int:
    stores = [await _totals(named) for named in named_stores(args.url)]
    if args.json:
        print(json.dumps({"stores": stores}))
        return 0
    heads = ["STORE", "NAMESPACES", "BLOCKS", "BYTES", "USED", "CAPACITY", "FREE", "DISK FREE"]
    rows = [
        [
            each["url"],
            count_text(each["namespaces"]),
            count_text(each["blocks"]),
            size_text(each["block_bytes"]),
            size_text(each["used_bytes"]),
            size_text(each["capacity_bytes"]),
            size_text(each["free_bytes"]),
            size_text(each["disk_free_bytes"]),
        ]
        for each in stores
    ]
    print(table(heads, rows, right=range(1, 8)))
    return 0


async def _totals(named: NamedStore) -> dict[str, Any]:
    good, bad = await readable(named)
    complain(named, bad)
    stats = await stats_of(named, [frame for _, frame in good])
    blocks, block_bytes = stats.blocks, stats.block_bytes
    if blocks is None or block_bytes is None:  # it does not keep count: do it here
        contents = [await count(named, frame) for _, frame in good]
        blocks, block_bytes = sum(h.blocks for h in contents), sum(h.bytes for h in contents)
    used_bytes = block_bytes if stats.used_bytes is None else stats.used_bytes
    capacity = stats.capacity_bytes
    disk_free_bytes = named.files and free_bytes(os.statvfs(named.files.path))
    return {
        "url": named.url,
        "namespaces": len(good) + len(bad),
        "unreadable_namespaces": bad,
        "blocks": blocks,
        "block_bytes": block_bytes,
        "used_bytes": used_bytes,
        "capacity_bytes": capacity,
        "free_bytes": None if capacity is None else max(0, capacity - used_bytes),
        "disk_free_bytes": disk_free_bytes,
        "policy": stats.policy,
    }
