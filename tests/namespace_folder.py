"""Where a file store keeps the files of one namespace, for tests that read or damage them."""

from dataclasses import dataclass
from pathlib import Path

from sglang_cake.core.keys import DESCRIPTION, BlockKey, Digest
from sglang_cake.stores.file.block_files import CORRUPT, block_names


@dataclass(frozen=True, slots=True)
class NamespaceFolder:
    root: Path
    digest: Digest

    @property
    def folder(self) -> Path:
        return self.root / self.digest.hex()

    @property
    def description(self) -> Path:
        return self.folder / DESCRIPTION

    @property
    def corrupt(self) -> Path:
        return self.folder / CORRUPT

    def block(self, key: BlockKey) -> Path:
        return self.root.joinpath(*block_names(self.digest, key))
