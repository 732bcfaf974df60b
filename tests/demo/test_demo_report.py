"""Reading a server's trace, and the demo's numbers and picture made from it."""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_cake.cli import demo, main
from sglang_cake.cli.demo_report import Arm, Arms, DemoFailed, draw, evaluate, report, table
from sglang_cake.demo.event_trace import read_event_trace
from sglang_cake.demo.sglang_server import Reply, SglangServer
from sglang_cake.simulator.shapes import MODELS

PROMPT, BLOCK, CHUNK = 1024, 128, 256
# Ten seconds to compute all, ten to load all; sent at 100, known to be stored at 101.
COMPUTE = [("claim", 101 + 2.5 * i, {"start": 256 * i, "stop": 256 * i + 256}) for i in range(4)]
LOAD = [
    *(("fetch", 101 + 1.25 * (8 - block), {"block": block}) for block in range(7, -1, -1)),
    ("attach", 111.0, {"start": 0, "stop": 1023}),
    ("claim", 111.0, {"start": 1023, "stop": 1024}),
]
BOTH = [
    *COMPUTE[:2],
    *(("fetch", 101 + 1.25 * (8 - block), {"block": block}) for block in range(7, 3, -1)),
    ("attach", 106.0, {"start": 512, "stop": 1023}),
    ("claim", 106.0, {"start": 1023, "stop": 1024}),
]


def written(path: Path, rid: str, middle: list[tuple[str, float, dict[str, Any]]]) -> None:
    events = [
        ("arrive", 100.5, {"tokens": PROMPT, "block_tokens": BLOCK}),
        ("found", 101.0, {"stored_blocks": 8}),
        *middle,
        ("done", middle[-1][1], {"computed_tokens": 0, "loaded_tokens": 0, "wasted_bytes": 0}),
    ]
    with path.open("a") as out:
        # A landing has its own instant and is written later: the reader sorts.
        for event, t_s, facts in sorted(events, key=lambda event: event[0] == "fetch"):
            out.write(json.dumps({"t_s": t_s, "rid": rid, "event": event, **facts}) + "\n")


def arm(folder: Path, mode: str, middle: list[Any], first_token_s: float, tokens: list[int]) -> Arm:
    path = folder / f"{mode}.jsonl"
    written(path, "warm-up", middle)
    written(path, mode, middle)
    cake = {"computed_tokens": 513, "loaded_tokens": 511}
    reply = Reply(tokens, {"id": mode, "cake": [cake]}, sent_s=100.0, first_token_s=first_token_s)
    return Arm(mode, path, [reply])


@pytest.fixture
def arms(tmp_path: Path) -> Arms:
    return Arms(
        arm(tmp_path, "compute", COMPUTE, 111.0, [1, 2]),
        arm(tmp_path, "load", LOAD, 111.5, [1, 2]),
        arm(tmp_path, "both", BOTH, 106.5, [1, 2]),
    )


def test_trace_steps_end_at_the_next_step_or_the_first_token(arms: Arms) -> None:
    steps = read_event_trace(arms.both.trace_file, "both", 106.5).steps
    assert [(step.start, step.stop) for step in steps] == [(0, 256), (256, 512), (1023, 1024)]
    assert [step.end_s - step.begin_s for step in steps] == [2.5, 2.5, 0.5]


def test_trace_block_load_time_is_the_time_between_landings(arms: Arms) -> None:
    trace = read_event_trace(arms.load.trace_file, "load", 111.5)
    assert [load.block for load in trace.loads] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert {load.land_s - load.begin_s for load in trace.loads} == {1.25}
    assert trace.stored_tokens == PROMPT - 1


def test_trace_unknown_request_raises_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no events of request nobody"):
        read_event_trace(tmp_path / "missing.jsonl", "nobody", 1.0)


def test_demo_report_evaluates_and_prints_its_numbers(arms: Arms) -> None:
    result = evaluate(arms, bandwidth=1024.0, prompt_bytes=10240)
    assert result["ttft_s"] == {"compute": 11.0, "load": 11.5, "both": 6.5}
    # One second before the first step, half of ten seconds, half a second for the last step.
    assert result["ideal_s"] == pytest.approx(6.5, rel=1e-3)
    assert result["ideal_meet_token"] == pytest.approx(512, abs=1)
    assert result["same_tokens"] is True
    assert (result["agreed_tokens"], result["new_tokens"]) == (2, 2)
    assert (result["computed_tokens"], result["loaded_tokens"]) == (513, 511)
    text = table(arms, result)
    assert "1.69x faster" in text
    assert "the same in every run" in text


def test_demo_report_different_tokens_are_reported(arms: Arms) -> None:
    arms.both.replies[0].output_ids[-1] = 9
    result = evaluate(arms, bandwidth=1024.0, prompt_bytes=10240)
    assert result["same_tokens"] is False
    assert "NOT THE SAME" in table(arms, result)


def test_demo_report_cold_run_must_give_equal_tokens(arms: Arms) -> None:
    cold = Reply([1, 9], {"id": "cold"}, sent_s=100.0, first_token_s=111.0)
    assert evaluate(arms, cold, bandwidth=1024.0, prompt_bytes=10240)["same_tokens"] is False
    cold.output_ids[-1] = 2
    assert evaluate(arms, cold, bandwidth=1024.0, prompt_bytes=10240)["same_tokens"] is True


def test_demo_report_nothing_loaded_raises_demo_failed(arms: Arms, tmp_path: Path) -> None:
    forgot = arms._replace(load=arm(tmp_path, "forgot", COMPUTE, 111.0, [1, 2]))
    with pytest.raises(DemoFailed, match="nothing was loaded"):
        evaluate(forgot, bandwidth=1024.0, prompt_bytes=10240)


def test_demo_report_lossy_codec_may_give_different_tokens(arms: Arms) -> None:
    arms.both.replies[0].output_ids[-1] = 9
    arms.load.replies[0].meta["cake"][0]["lossy_tokens"] = 511
    result = evaluate(arms, bandwidth=1024.0, prompt_bytes=10240)
    assert result["same_tokens"] is False
    assert (result["agreed_tokens"], result["new_tokens"]) == (1, 2)
    told = "not the same, as may be with a lossy codec: the first 1 of 2 are"
    assert told in table(arms, result)
    arms.both.replies[0].output_ids[-1] = arms.load.replies[0].output_ids[-1]
    result = evaluate(arms, bandwidth=1024.0, prompt_bytes=10240)
    assert "the same in every run" in table(arms, result)


def test_demo_report_picture_is_written_as_svg_and_png(arms: Arms, tmp_path: Path) -> None:
    result = evaluate(arms, bandwidth=1024.0, prompt_bytes=10240)
    paths = draw(arms, result, tmp_path / "meet")
    assert [path.suffix for path in paths] == [".svg", ".png"]
    assert all(path.stat().st_size > 10_000 for path in paths)


@pytest.mark.parametrize("drawn", [True, False], ids=["matplotlib", "no matplotlib"])
def test_demo_report_is_printed_and_written_also_without_matplotlib(
    drawn: bool,
    arms: Arms,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not drawn:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = evaluate(arms, bandwidth=1024.0, prompt_bytes=10240)
    said: list[str] = []
    report(arms, result, tmp_path, said.append)
    assert ("needs matplotlib" in said[0]) is not drawn
    written_result = json.loads((tmp_path / "result.json").read_text())
    assert ("picture" in written_result) is drawn
    out = capsys.readouterr().out
    assert table(arms, result) in out
    assert json.loads(out.splitlines()[-1]) == written_result


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_position_embeddings": 4096}, "set --prompt-tokens 4047 or less"),
        ({"is_encoder_decoder": True}, "does not support encoder-decoder models"),
    ],
    ids=["context", "kind"],
)
def test_demo_unservable_model_exits_with_one_line(
    changes: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama-3.1-8b"] | changes))
    assert main(["demo", "--model", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_demo_folder_without_config_exits_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/none"])
def test_demo_out_that_cannot_be_made_exits_with_one_line(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also as root, before a model is built."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(demo, "build_llama", lambda *args, **options: pytest.fail("it is built"))
    assert main(["demo", "--out", str(tmp_path / out)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"sglang-cake: --out {tmp_path / out} cannot be made or written: ")
    assert said.err.count("\n") == 1


def test_demo_leaves_what_its_folder_held_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as the store of a server."""
    kept = tmp_path / "store" / "block"
    kept.parent.mkdir()
    kept.write_text("of a server")
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama-3.1-8b"]))
    monkeypatch.setattr(demo, "make_prompt", lambda *args, **options: ([1] * 4096, False))
    args = ["--model", str(tmp_path), "--store", "file:///dev/null/x", "--out", str(tmp_path)]
    assert main(["demo", *args]) == 2  # after all else was prepared
    assert "/dev/null/x" in capsys.readouterr().err
    assert kept.read_text() == "of a server"


# A server with these metrics that answers `/generate` with one token, but not in the arm `load`.
STAND_IN = r"""
import http.server, json, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
fails = "bandwidth=" in " ".join(sys.argv)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(200, METRICS.encode())
    def do_POST(self):
        event = {"output_ids": [5], "meta_info": {"id": "r"}}
        self.reply(500 if fails else 200, b"data: " + json.dumps(event).encode() + b"\n\n")
    def reply(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def run_demo(folder: Path, monkeypatch: pytest.MonkeyPatch, metrics: dict[str, int]) -> int:
    """`sglang-cake demo` with stand-ins, up to the arm `load`."""
    lines = "".join(f'sglang:cake_{name}_total{{x="y"}} {n}\n' for name, n in metrics.items())
    script = folder / "stand_in.py"
    script.write_text(f"METRICS = {lines!r}\n{STAND_IN}")
    (folder / "config.json").write_text(json.dumps(MODELS["llama-3.1-8b"]))
    launched = functools.partial(SglangServer, launcher=(sys.executable, str(script)))
    monkeypatch.setattr(demo, "SglangServer", launched)
    monkeypatch.setattr(demo, "make_prompt", lambda *args, **options: ([1] * 4096, False))
    monkeypatch.setattr(demo, "STORE_QUIET_S", 0.0)
    store = ["--store", f"file://{folder}/kv", "--codec", "zstd"]
    return main(["demo", "--model", str(folder), "--out", str(folder / "out"), *store])


def test_demo_error_of_a_server_is_one_line_that_names_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(tmp_path, monkeypatch, {"stored_blocks": 32}) == 1
    said = capsys.readouterr()
    (line,) = [line for line in said.out.splitlines() if "failed: " in line]
    assert "failed: load: HTTP Error 500: Internal Server Error (the" in line
    assert line.endswith(f"(the server's log: {tmp_path}/out/server-load.log)")
    assert said.err == ""


@pytest.mark.parametrize("new", [0, 8, 32])
def test_demo_with_a_codec_counts_blocks_of_a_used_store_as_they_are_stored(
    new: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A block of 128 tokens has 16 MiB, and the codec leaves half of it."""
    half, old = 2**23, 32 - new
    metrics = {"stored_blocks": new, "encoded_blocks": new, "stored_bytes": new * half}
    metrics |= {"read_blocks": old, "read_bytes": old * half}
    assert run_demo(tmp_path, monkeypatch, metrics) == 1
    assert f"the prompt's KV is {32 * half / 1e6:.1f} MB as it is stored" in capsys.readouterr().out
