"""How fast a model's files are hashed, beside SHA-256 alone and reading alone.

    python -m benchmarks hashing [--files 4] [--bytes 1000000000] [--repeats 5]

The files lie in the page cache, as they do after SGLang has loaded them. Arms take turns, round by
round: the digest of all files (with the threads that a server uses), SHA-256 over memory in one
thread, and reading the files in one thread. GB are 10^9 bytes.
"""

import argparse
import hashlib
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.facts import RESULTS, header, write
from benchmarks.stats import spread
from sglang_cake.integration.identity.content import READ_BYTES, content_digest, file_states


def digest(files: list[Path]) -> None:
    content_digest(file_states(files))


def sha256_alone(files: list[Path]) -> None:
    buffer, hashed = memoryview(bytearray(READ_BYTES)), hashlib.sha256()
    for _ in range(sum(file.stat().st_size for file in files) // READ_BYTES):
        hashed.update(buffer)


def read_alone(files: list[Path]) -> None:
    buffer = memoryview(bytearray(READ_BYTES))
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


ARMS = {"digest": digest, "sha256 alone": sha256_alone, "read alone": read_alone}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--bytes", type=int, default=10**9, help="of each file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "hashing-cpu.json")
    args = parser.parse_args()
    rates: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        files = [Path(folder) / f"{number}.safetensors" for number in range(args.files)]
        for file in files:
            with file.open("wb") as stream:
                for _ in range(args.bytes // READ_BYTES):
                    stream.write(os.urandom(READ_BYTES))
        total = sum(file.stat().st_size for file in files)
        for _ in range(args.repeats):
            for name, arm in ARMS.items():
                for file in files:  # as changed: no digest is remembered
                    os.utime(file)
                began_s = time.perf_counter()
                arm(files)
                rates[name].append(total / (time.perf_counter() - began_s) / 1e9)
    for name, found in rates.items():
        print(f"{name:14} {spread(found)} GB/s")
    settings = {"files": args.files, "bytes": args.bytes, "repeats": args.repeats}
    write(args.out, {**header("hashing", **settings), "gb_per_s": rates})


if __name__ == "__main__":
    main()
