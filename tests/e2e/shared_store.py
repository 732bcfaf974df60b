"""A store server that SGLang servers share."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Self

from live import StoreView
from patient import SGLANG_CAKE

from sglang_cake.demo.sglang_server import free_port


class SharedStore:
    """`sglang-cake store serve`, always on the same port."""

    def __init__(self, root: Path) -> None:
        self.view, self.port = StoreView(root), free_port()
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                *(*SGLANG_CAKE, "store", "serve", "--root", str(self.view.root)),
                *("--port", str(self.port), "--capacity", "1GB", "--min-free", "0"),
            ],
            stdout=subprocess.PIPE,
            env=os.environ,
            text=True,
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().split()[-1]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        pid = self._process.pid
        workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for one in (pid, *map(int, workers)):
            os.kill(one, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self._process.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        assert self._process.wait(60) == 0
