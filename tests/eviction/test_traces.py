"""The three kinds of trace files, and what is said about broken ones."""

import json

import pytest
import zstandard

from sglang_cake.cli import main
from sglang_cake.core.errors import ConfigError
from sglang_cake.simulator.request_traces import TraceRequest, read_trace
from sglang_cake.stores.eviction import POLICIES

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 512, "output_length": 1, "hash_ids": [0]},
]
BAILIAN = [
    {
        "chat_id": 5,
        "parent_chat_id": -1,
        "timestamp": 0.25,
        "input_length": 20,
        "output_length": 3,
        "type": "text",
        "turn": 2,
        "hash_ids": [7, 9],
    }
]
OURS = [
    {"t_s": 1.5, "block_tokens": 128, "input_length": 200, "hash_ids": [3, 4], "workload": "rag"}
]


def written(tmp_path, lines, name="trace.jsonl"):
    data = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    path = tmp_path / name
    raw = data.encode()
    path.write_bytes(zstandard.compress(raw) if name.endswith(".zst") else raw)
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.zst"])
def test_read_trace_mooncake_file_gives_its_requests(tmp_path, name):
    trace = read_trace(written(tmp_path, MOONCAKE, name))
    assert trace.block_tokens == 512
    assert trace.requests == (
        TraceRequest(0.0, 1100, (0, 1, 2)),
        TraceRequest(3.0, 512, (0,)),
    )


def test_read_trace_bailian_file_gives_its_requests(tmp_path):
    trace = read_trace(written(tmp_path, BAILIAN))
    assert trace.block_tokens == 16
    assert trace.requests == (TraceRequest(0.25, 20, (7, 9), "text", 2),)


def test_read_trace_recorded_file_gives_its_requests(tmp_path):
    trace = read_trace(written(tmp_path, OURS))
    assert trace.block_tokens == 128
    assert trace.requests == (TraceRequest(1.5, 200, (3, 4), "rag"),)


def test_read_trace_earlier_timestamp_is_raised_to_the_previous_one(tmp_path):
    late, early = dict(MOONCAKE[0], timestamp=9000), MOONCAKE[1]
    assert [r.at_s for r in read_trace(written(tmp_path, [late, early])).requests] == [9.0, 9.0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"timestamp"', "line 2"),
        ("[" * 100_000, "line 2"),
        (dict(MOONCAKE[0], timestamp=10**400), "line 2"),
        ("[]\n", "not a JSON object"),
        ({"timestamp": 1, "hash_ids": [1]}, "'input_length' is missing"),
        (dict(MOONCAKE[0], hash_ids=[1, 1, 2]), "same hash_id twice"),
        (dict(MOONCAKE[0], hash_ids=[1, -2, 3]), "whole numbers"),
        (dict(MOONCAKE[0], hash_ids=[1, 2**64, 3]), "whole numbers"),
        (dict(BAILIAN[0], type="\ud800"), "line 2"),
        (dict(MOONCAKE[0], hash_ids=[1]), "are not 1100 tokens"),
        (dict(MOONCAKE[0], hash_ids=None), "line 2"),
        (dict(MOONCAKE[0], timestamp="1"), "line 2"),
        (BAILIAN[0], "another size"),
    ],
)
def test_read_trace_bad_line_raises_config_error_with_its_number(tmp_path, line, words):
    path = written(tmp_path, [MOONCAKE[0], line])
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert words in str(caught.value)
    assert "line 2" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "data"),
    [("none.jsonl", None), ("empty.jsonl", b""), ("t.jsonl.zst", b"nonsense"), ("t", b"\xff\n")],
)
def test_trace_replay_unreadable_trace_file_is_one_error_line(tmp_path, capsys, name, data):
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    assert main(["trace", "replay", str(path)]) == 2
    error = capsys.readouterr().err
    assert name in error
    assert error.count("\n") == 1


def test_trace_replay_cut_zst_file_is_one_error_line(tmp_path, capsys):
    path = written(tmp_path, MOONCAKE * 20_000, "trace.jsonl.zst")
    path.write_bytes(path.read_bytes()[:-20])
    assert main(["trace", "replay", str(path)]) == 2
    error = capsys.readouterr().err
    assert error == f"sglang-cake: trace {path} is cut: its end is missing\n"


def test_read_trace_zst_file_of_two_frames_gives_the_requests_of_both(tmp_path):
    path = written(tmp_path, MOONCAKE, "trace.jsonl.zst")
    path.write_bytes(2 * path.read_bytes())
    assert len(read_trace(path).requests) == 2 * len(MOONCAKE)


NAMED = {
    "policy",
    "capacity_blocks",
    "refs",
    "hits",
    "hit_ratio",
    "island_hit_ratio",
    "seconds_saved",
    "us_per_eviction",
}


def replayed(path, capsys, *options):
    assert main(["trace", "replay", str(path), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_trace_replay_json_reports_hits_and_saved_seconds(tmp_path, capsys):
    path = written(tmp_path, MOONCAKE * 3)
    one = replayed(path, capsys, "--policy", "lru", "--capacity", "3")
    assert one.keys() >= NAMED
    assert (one["policy"], one["capacity_blocks"], one["refs"], one["hits"]) == ("lru", 3, 12, 9)
    assert one["hit_ratio"] == one["optimum_hit_ratio"] == 9 / 12
    assert 0 < one["seconds_saved"] <= one["seconds_saved_bound"]


def test_trace_replay_skips_parts_of_recorded_lines_and_names_them(tmp_path, capsys):
    line = json.dumps(OURS[0])
    path = written(tmp_path, [OURS[0], line[:50] + "\n", OURS[0], line[:3] + "\n", OURS[0]])
    found = replayed(path, capsys, "--policy", "lru", "--capacity", "3")
    assert (found["refs"], found["hits"]) == (6, 4)
    assert main(["trace", "replay", str(path), "--policy", "lru"]) == 0
    expected = f"warning: {path}: broken lines skipped: 2 (the first is line 2)\n"
    assert capsys.readouterr().err == expected
    assert main(["trace", "replay", str(written(tmp_path, [line[:50]]))]) == 2
    assert capsys.readouterr().err == f"sglang-cake: trace {path} has no requests\n"


def test_trace_replay_high_admission_threshold_writes_no_blocks(tmp_path, capsys):
    path = written(tmp_path, MOONCAKE * 3)
    options = ("--policy", "lru", "--capacity", "3", "--told-turns")
    assert replayed(path, capsys, *options)["written_blocks"] == 3
    assert replayed(path, capsys, *options, "--admit", "1e9")["written_blocks"] == 0


def test_trace_replay_with_admission_names_no_optimum(tmp_path, capsys):
    """It may not write blocks that are used once, and the optimum writes every block."""
    path = written(tmp_path, MOONCAKE * 3)
    options = ("--policy", "lru", "--capacity", "3", "--admit", "0.5")
    found = replayed(path, capsys, *options)
    assert found["optimum_hit_ratio"] is found["optimum_seconds_saved"] is None
    assert found["seconds_saved"] <= found["seconds_saved_bound"]
    assert main(["trace", "replay", str(path), *options]) == 0
    assert "-" in capsys.readouterr().out.splitlines()[-1].split()


def test_trace_replay_without_a_policy_option_runs_every_policy(tmp_path, capsys):
    path = written(tmp_path, MOONCAKE * 3)
    some = replayed(path, capsys, "--capacity", "2,3", "--shape", "70b")
    assert [(each["policy"], each["capacity_blocks"]) for each in some] == [
        (policy, capacity) for capacity in (2, 3) for policy in POLICIES
    ]


def test_trace_replay_without_json_prints_a_table(tmp_path, capsys):
    path = written(tmp_path, MOONCAKE * 3)
    assert main(["trace", "replay", str(path), "--policy", "lru,cake", "--leaf"]) == 0
    shown = capsys.readouterr().out
    assert "6 requests, 12 references to 3 blocks of 512 tokens" in shown
    assert "cake" in shown


@pytest.mark.parametrize(
    "options",
    [
        ("--policy", "best"),
        ("--capacity", "0"),
        ("--capacity", "1e3"),
        ("--policy", ""),
        ("--admit", "-1"),
        ("--admit", "nan"),
    ],
)
def test_trace_replay_invalid_options_are_one_error_line(tmp_path, capsys, options):
    path = written(tmp_path, MOONCAKE)
    assert main(["trace", "replay", str(path), *options]) == 2
    assert capsys.readouterr().err.count("\n") == 1
