"""Codecs on a shared device, for real: Figure 8 and section 5.4 of Cake's anonymous version.

    python -m benchmarks codec_share [--small] [--codecs raw,int8,cachegen2] [--out FILE] [--docs]

As `codec_ttft`, but the link stays as it is, and the device's share changes, as in the paper: of
the tokens of every step the prompt gets a part, and prompts that are made up for that take the rest
(`shared_device.py`, which every server is started through). The link is a fraction of the one on
which loading raw KV takes as long as computing on the whole device: with a third of it loading
takes three times as long, as with the paper's 10 Gbps.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from benchmarks import documents, facts, servers, share_report, stats
from benchmarks.bench_codec_ttft import Bench, checked, parser_of, run
from benchmarks.paper.pictures import draw
from benchmarks.shared_device import SHARE_ENV, STEP_TOKENS

FULL = {
    "codecs": "raw,int8,cachegen2",
    "tokens": 3584,
    "shares": [0.9, 0.5, 0.25, 0.1],
    "link": 1 / 3,
    "repeats": 3,
    "name": "cpu",
}
SMALL = {**FULL, "tokens": 1024, "shares": [0.9, 0.1], "repeats": 1, "name": "small"}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__, FULL)
    parser.add_argument("--shares", type=stats.numbers, help="default 0.9,0.5,0.25,0.1")
    parser.add_argument("--link", type=float, help="ratio to the balanced one, default 1/3")
    parser.add_argument("--docs", action="store_true", help="write tables and picture to reports/")
    args = checked(parser, argv, "codec-share", full=FULL, small=SMALL)
    if max(args.shares) > 1 or args.link <= 0:
        parser.error("shares are at most 1, and a link is faster than nothing")
    return args


@dataclass(slots=True)
class SharedBench(Bench):
    """The servers share one device with others; all have the same share."""

    varied: ClassVar[str] = "share"
    chunk_tokens: ClassVar[int] = STEP_TOKENS

    def settings(self) -> dict[str, Any]:
        self._share_out(1.0)  # as they start, and when their stores are filled
        env = servers.environment({SHARE_ENV: str(self.work / "share")})
        return {"env": env, "launcher": servers.launcher("shared_device")}

    def points(self) -> Sequence[float]:
        return list(self.args.shares)

    def go_to(self, point: float) -> float:
        self._share_out(point)
        link: float = self.args.link
        self.pace(link)
        return link

    def _share_out(self, share: float) -> None:
        """Nobody runs now, so nobody reads the file."""
        (self.work / "share").write_text(f"{share}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0."""
    args = parse_args(argv)
    result = run(SharedBench, args, "codec-share")
    result["settings"] |= {"link": round(args.link, 4), "step_tokens": STEP_TOKENS}
    facts.write(args.out, result)
    texts = share_report.sections(result)
    print("", *texts.values(), f"result: {facts.shown(args.out)}", sep="\n")
    if args.docs:
        documents.update(texts, share_report.DOC)
        draw(lambda figure: share_report.picture(figure, result), share_report.PICTURE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
