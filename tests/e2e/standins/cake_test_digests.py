"""Writes down what each rank computed. A plugin of SGLang, used only by tests.

With CAKE_TEST_DIGESTS=folder, each checkpoint of a request appends a line to a file of its rank:
the request, the number of tokens, and the SHA-256 of their KV in this rank's pool.
"""

import hashlib
import os
from pathlib import Path
from typing import Any


def register() -> None:
    folder = os.environ.get("CAKE_TEST_DIGESTS")
    if folder is None:
        return
    from sglang.srt.runtime_context import get_parallel

    from sglang_cake.integration.memory.block_saving import BlockSaving

    original = BlockSaving.checkpointed

    def checkpointed(saving: Any, record: Any, tokens: Any, row: Any, **more: Any) -> None:
        digest = hashlib.sha256()
        for plane in saving.kv.rows:
            digest.update(plane[row.long()].numpy().tobytes())
        with open(Path(folder) / str(get_parallel().tp_rank), "a") as file:
            file.write(f"{record.rid} {len(tokens)} {digest.hexdigest()}\n")
        original(saving, record, tokens, row, **more)

    BlockSaving.checkpointed = checkpointed  # type: ignore[method-assign]
