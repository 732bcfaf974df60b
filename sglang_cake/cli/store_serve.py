"""`sglang-cake store serve`: share a folder of blocks over HTTP."""

import argparse
import logging
import sys
from pathlib import Path
from urllib.parse import quote

from sglang_cake.cli.named_stores import checked
from sglang_cake.stores.url import StoreUrl, parse_quota


def add_serve_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "serve",
        help="share a folder of blocks over HTTP",
        description="Serves a folder of blocks to SGLang servers: --cake-store http://HOST:PORT.",
    )
    add = parser.add_argument
    add("--root", type=Path, required=True, help="the folder; made if it is not there")
    add("--capacity", help="most bytes on the disk, as 10TB")
    add("--min-free", help="bytes that stay free on the disk (1GB)")
    add(
        "--policy",
        help="eviction policy: cake-prefix (default), workload, lru, ... (docs/eviction.md)",
    )
    add("--tenant-quota", help="most bytes of one tenant on the disk, as 100GB")
    add("--fair", choices=("on", "off"), help="on: evict from the largest tenant first (off)")
    add("--admit", help="least seconds saved per second of writing, as 0.3 (0: write everything)")
    add("--fsync", help="data: stored blocks survive a power cut; off (default)")
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s: this machine)")
    add("--port", type=int, default=8700, help="%(default)s; 0 is any that is free")
    add("--tls-cert", type=Path, help="certificate chain, PEM")
    add("--tls-key", type=Path, help="its private key, PEM")
    add(
        "--token-file",
        type=Path,
        help="clients' tokens, one a line (one is made in your config folder)",
    )
    add("--read-token-file", type=Path, help="tokens of clients that may only read, one a line")
    add("--workers", type=int, help="worker processes (as many as CPUs, at most 4)")
    add("--namespace-quota", help="most bytes of one namespace on the disk, as 1TB")
    parser.set_defaults(run=run)


# Options of a file store's URL.
OPTIONS = ("capacity", "min_free", "policy", "tenant_quota", "fair", "admit", "fsync")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Raises: ConfigError, StoreUnavailable."""
    from sglang_cake.stores.file.file_store import parse as parse_file
    from sglang_cake.stores.http.auth import make_own_token
    from sglang_cake.stores.http.server_processes import DEFAULT_WORKERS, ServeSettings, serve

    quota: int | None = None
    if args.namespace_quota is not None:
        quota = checked("--namespace-quota", args.namespace_quota, parse_quota)
    given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    root = args.root.absolute()
    token_file = make_own_token() if args.token_file is None else args.token_file
    settings = ServeSettings(
        source=parse_file(StoreUrl(f"file://{root}", "file", quote(str(root)), given)),
        host=args.host,
        port=args.port,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        token_file=token_file,
        read_token_file=args.read_token_file,
        namespace_quota_bytes=quota,
        workers=DEFAULT_WORKERS if args.workers is None else args.workers,
    )
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")

    def announce(url: str) -> None:
        print(f"sglang-cake: {args.root} is served at {url}", flush=True)
        named = f"{url}?token_file={quote(str(token_file.absolute()))}"
        print(f'sglang-cake: clients: --cake-store "{named}", with a copy of that file', flush=True)

    serve(settings, announce)
    print("sglang-cake: stopped", file=sys.stderr)
    return 0
