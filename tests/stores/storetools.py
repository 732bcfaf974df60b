"""What the tests of the store's tools share: real file stores, and the command line."""

import asyncio
import json
import subprocess
import sys

import pytest
from filestore import closing
from private_files import write_private

from sglang_cake.cli import main
from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.errors import ConfigError
from sglang_cake.core.keys import Namespace
from sglang_cake.stores.open_store import parse_sources
from sglang_cake.testing.store_contract import LAYOUT, block_of, key_of


def frame_named(model, *, tp_rank=0, tp_size=1):
    """A namespace with the fields that a server gives it."""
    facts = {
        "name": model,
        "weights": model,
        "layout": LAYOUT.describe(),
        "tp_rank": tp_rank,
        "tp_size": tp_size,
    }
    return BlockFrame(Namespace(tuple((name, str(value)) for name, value in facts.items())), LAYOUT)


ALICE, BOB = frame_named("alice-7b", tp_rank=1, tp_size=2), frame_named("bob-13b")


def write_key_file(folder, secret=bytes(range(32))):
    """For `?key_file=`."""
    return write_private(folder / "sealing-key", secret.hex() + "\n")


def url_of(root):
    return f"file://{root}?min_free=0"


def opened_store(root, frame):
    """One namespace of a file store, which is closed at the end."""
    (source,) = parse_sources(url_of(root))
    return closing(source.open(frame, depth=2))


def refusal_of(text):
    """What a store URL is refused with: one line."""
    with pytest.raises(ConfigError) as error:
        parse_sources(text)
    assert "\n" not in str(error.value)
    return str(error.value)


def refusal_in_new_process(url, first):
    """The same in a process of its own, which runs `first` before anything is imported."""
    code = (
        f"import sys\n{first}\n"
        "from sglang_cake.core.errors import ConfigError\n"
        "from sglang_cake.stores.open_store import parse_sources\n"
        "try:\n"
        f"    parse_sources({url!r})\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def fill(root, frame, *names):
    async def main():
        async with opened_store(root, frame) as store:
            for name in names:
                assert await store.put(key_of(name), block_of(name))

    root.mkdir(exist_ok=True)
    asyncio.run(main())


def held(root, frame):
    async def main():
        async with opened_store(root, frame) as store:
            return {block.key async for block in store.list_blocks()}

    return asyncio.run(main())


def file_of(root, frame, name):
    key = key_of(name).hex()
    return root / frame.digest.hex() / key[:2] / key[2:4] / key


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def store(*args):
    """The exit status of `sglang-cake store ARGS`."""
    return main(["store", *map(str, args)])


def told(capsys, *args, status=0):
    """What the tool answers with `--json`."""
    assert store(*args, "--json") == status
    return json.loads(capsys.readouterr().out)
