"""The grid search, and the table on disk."""

import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_cake.core.keys import Digest, Span
from sglang_cake.runahead.grid_search import grid_search
from sglang_cake.runahead.partition import Partition, balanced, even
from sglang_cake.runahead.partition_table import PartitionTable, load_table, save_table, table_path


def distance_to(target: Sequence[int]) -> Callable[[Partition], float]:
    def one(partition: Partition) -> float:
        inner = partition.bounds[1:-1]
        return 1.0 + sum((a - b) ** 2 for a, b in zip(inner, target, strict=True))

    return one


@settings(max_examples=40)
@given(st.integers(2, 4), st.data())
def test_grid_search_finds_the_minimum_of_a_convex_cost(workers: int, data: st.DataObject) -> None:
    inner = data.draw(
        st.lists(st.integers(1, 95), min_size=workers - 1, max_size=workers - 1, unique=True)
    )
    one = distance_to(sorted(inner))
    found = grid_search(
        even(Span(0, 96), workers),
        lambda partitions: [one(p) for p in partitions],
        stride_tokens=16,
        min_stride_tokens=1,
    )
    assert found.partition.bounds == (0, *sorted(inner), 96)
    assert found.ttft_s == 1.0


def test_grid_search_measures_each_partition_once_in_whole_pages() -> None:
    asked: list[Partition] = []

    def measure(partitions: Sequence[Partition]) -> list[float]:
        asked.extend(partitions)
        return [abs(p.bounds[1] - 600.0) for p in partitions]

    found = grid_search(
        even(Span(0, 1024), 2, page_tokens=16),
        measure,
        stride_tokens=128,
        min_stride_tokens=16,
        page_tokens=16,
    )
    assert len(asked) == len(set(asked)) == found.measured
    assert all(p.bounds[1] % 16 == 0 for p in asked)
    assert found.partition.bounds[1] in (592, 608)


def test_grid_search_grid_size_is_points_to_the_power_of_bounds() -> None:
    """The paper's appendix D has it the other way round."""
    count: list[int] = []

    def measure(partitions: Sequence[Partition]) -> list[float]:
        count.append(len(partitions))
        return [float(partition != partitions[62]) for partition in partitions]  # the middle

    grid_search(even(Span(0, 10_000), 4), measure, stride_tokens=8, min_stride_tokens=8)
    assert count == [5 ** (4 - 1)]


@given(st.integers(2, 5), st.integers(1000, 20_000))
def test_partition_table_returns_what_was_put(workers: int, tokens: int) -> None:
    table = PartitionTable()
    best = balanced(Span(0, tokens), workers, lambda a, b: (b - a) * (1.0 + b / 1000))
    table.put(tokens, best)
    assert table.predict(Span(0, tokens), workers) == best
    assert table.predict(Span(0, tokens), workers + 1) is None


def test_partition_table_interpolates_lengths_and_clamps_beyond() -> None:
    table = PartitionTable()
    table.put(1000, Partition((0, 500, 1000)))
    table.put(2000, Partition((0, 1200, 2000)))
    cut = {
        tokens: table.predict(Span(0, tokens), 2).fractions[0]  # type: ignore[union-attr]
        for tokens in (500, 1000, 1500, 2000, 4000)
    }
    assert cut == pytest.approx({500: 0.5, 1000: 0.5, 1500: 0.55, 2000: 0.6, 4000: 0.6})
    assert table.predict(Span(64, 1000), 2) is None  # not a whole prompt


def test_partition_table_saved_file_is_private_and_loads_equal(tmp_path: Path) -> None:
    path = table_path(tmp_path / "tables", "a/machine", Digest(b"\1" * 32))
    assert path.parent == tmp_path / "tables"
    table = PartitionTable()
    table.put(4096, Partition((0, 2500, 4096)))
    save_table(path, table)
    assert load_table(path).entries == table.entries
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"version": 2, "shares": {}}',
        '{"version": 1, "shares": {"2": {"10": [0.5, 0.6]}}}',
        '{"version": 1, "shares": {"2": {"10": [1.0]}}}',
        '{"version": 1, "shares": {"0": {"10": []}}}',
        '{"version": 1, "shares": {"2": {"10": [-0.5, 1.5]}}}',
        '{"version": 1, "shares": [1]}',
    ],
)
def test_partition_table_damaged_file_is_empty(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    assert load_table(path).entries == {}
