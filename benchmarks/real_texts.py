"""Long texts that every Debian machine with Python has: licences, Python's manual, its sources."""

import sysconfig
from pathlib import Path

LICENCES = Path("/usr/share/common-licenses")
SOURCES = Path(sysconfig.get_path("stdlib"))
# Of chapters of the language reference, as `help()` shows them.
MANUAL = {
    "manual: data model": ("objects", "types"),
    "manual: statements": ("compound", "dynamic-features", "exceptions", "execmodel"),
}


def real_texts() -> dict[str, str]:
    """Eight documents by name, each of 3,500 tokens or more."""
    from pydoc_data.topics import topics

    found = {name: (LICENCES / name).read_text() for name in ("GPL-3", "GFDL-1.3", "MPL-2.0")}
    for name, chapters in MANUAL.items():
        found[name] = "\n\n".join(topics[chapter] for chapter in chapters)
    for name in ("argparse.py", "statistics.py", "asyncio/base_events.py"):
        found[name] = (SOURCES / name).read_text()
    return found
