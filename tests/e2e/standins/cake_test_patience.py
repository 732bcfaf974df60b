"""Waits for what a busy machine is late with. A plugin of SGLang, used only by tests.

The product gives up waiting for the index of a file store after 5 s, for a copy after 2 s, and for
a read after 5 s: what it loads and stores then is not what a test expects.
"""

import os

LIMIT_S = 60.0
IMPATIENT = "CAKE_TEST_IMPATIENT"  # set: nothing changes


def register() -> None:
    from sglang_cake.integration import flags

    # These imports are heavy, so only in the scheduler's process.
    if IMPATIENT in os.environ or not flags.is_enabled_child():
        return
    from sglang_cake.integration.memory import copier
    from sglang_cake.loading.loader import Loader
    from sglang_cake.stores.file import index_supervisor

    copier.PATIENCE_S = LIMIT_S  # before `build` is imported, which takes it
    assert Loader.__init__.__kwdefaults__ is not None
    Loader.__init__.__kwdefaults__["least_limit_s"] = LIMIT_S
    index_supervisor.OPEN_WAIT_S = LIMIT_S
