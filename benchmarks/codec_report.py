"""Results of `bench_codec` as Markdown, and their places: the report, and docs/codecs.md."""

from typing import Any

from benchmarks.documents import table
from benchmarks.facts import REPORTS, ROOT

DOC = REPORTS / "codecs.md"
PAGE = ROOT / "docs" / "codecs.md"
COPY = "plain copy"


def sizes(result: dict[str, Any]) -> str:
    """Ratio by shape, and how fast on the first shape."""
    shapes = [shape["name"] for shape in result["shapes"]]
    rows: dict[str, list[str]] = {}
    for row in result["speeds"]:
        if row["codec"] != COPY and not _is_setting(row["codec"]):
            cell = f"{row['ratio']:.2f} ({row['bytes_per_token'] / 1024:.4g} KiB)"
            rows.setdefault(row["codec"], []).append(cell)
    return table(["codec", *shapes], [[codec, *cells] for codec, cells in rows.items()], right=True)


def choice(result: dict[str, Any]) -> str:
    """What decides between codecs, of the first shape: the ratio, and the speed of decoding."""
    rows = [
        [row["codec"], f"{row['ratio']:.2f}", f"{row['decode_gb_per_s_1_core']['median']:.3g}"]
        for row in result["speeds"]
        if row["shape"] == result["shapes"][0]["name"]
        and row["codec"] != COPY
        and not _is_setting(row["codec"])
    ]
    head = ["codec", "times smaller than bfloat16", "decoded, GB/s a core"]
    return table(head, rows, right=True)


def speed(result: dict[str, Any], shape: str) -> str:
    """GB/s and the ratio to a plain copy, of one shape."""
    cores = result["settings"]["cores"]
    rows = []
    for row in result["speeds"]:
        if row["shape"] == shape and not _is_setting(row["codec"]):
            cells = [
                f"{row[f'{what}_gb_per_s_{where}']['median']:.3g} "
                f"({row[f'{what}_to_copy_{where}']['median']:.2g})"
                for what in ("encode", "decode")
                for where in (("1_core", "all_cores") if cores > 1 else ("1_core",))
            ]
            rows.append([row["codec"], *cells])
    where = ("1 core", f"{cores} cores") if cores > 1 else ("1 core",)
    head = [f"{what}, {cores}" for what in ("encode", "decode") for cores in where]
    return table(["codec", *head], rows, right=True)


def zstd(result: dict[str, Any]) -> str:
    """What the shuffle, the level and long mode do."""
    rows = [
        [
            row["codec"],
            f"{row['ratio']:.3f}",
            f"{row['encode_gb_per_s_1_core']['median']:.3f}",
            f"{row['decode_gb_per_s_1_core']['median']:.3f}",
        ]
        for row in result["speeds"]
        if _is_setting(row["codec"])
    ]
    return table(
        ["setting", "ratio", "encode GB/s, 1 core", "decode GB/s, 1 core"], rows, right=True
    )


def quality(result: dict[str, Any]) -> str:
    """What the model makes of each codec."""
    return _losses(result["quality"])


def sink(result: dict[str, Any]) -> str:
    """What it is worth to keep the first token."""
    rows = []
    for name, row in result["no_sink"].items():
        kept = result["quality"][name]
        ratios = [a / b for a, b in zip(row["kl_by_window"], kept["kl_by_window"], strict=True)]
        rows.append(
            [
                name,
                f"{row['kl']:.2g}",
                f"{kept['kl']:.2g}",
                f"{row['kl'] / kept['kl']:.1f} ({min(ratios):.1f} to {max(ratios):.1f})",
            ]
        )
    head = ["codec", "KL, all tokens alike", "KL, first token kept", "ratio (of texts)"]
    return table(head, rows, right=True)


def ranks(result: dict[str, Any]) -> str:
    """Whether the measure of `--cake-max-error` ranks codecs as the model does."""
    agree = result["ranks"]
    return (
        f"Spearman's correlation of this measure and KL is {agree['codecs']:.2f} over the codecs "
        f"that lose bits, and {agree['codecs_and_texts']:.2f} over every pair of codec and text."
    )


def structure(result: dict[str, Any]) -> dict[str, str]:
    """Marker in the document -> what belongs there: of each layer the trained model, and in
    parentheses one with random weights."""
    keys = ("k_largest_to_median", "v_largest_to_median", "k_neighbours", "v_neighbours")
    trained, random = result["structure"].values()
    rows = [
        [str(layer), *(f"{one[key]:.2f} ({other[key]:.2f})" for key in keys)]
        for layer, (one, other) in enumerate(zip(trained, random, strict=True), 1)
    ]
    head = ["layer", "K: largest channel", "V: largest channel", "K: neighbours", "V: neighbours"]
    return {"structure": table(head, rows, right=True)}


def varied_table(result: dict[str, Any]) -> dict[str, str]:
    """Marker in the document -> what belongs there."""
    rows = [
        [
            name,
            f"{row['bits_per_number']:.2f}",
            f"{row['kl']:.2g} ({min(row['kl_by_window']):.2g} to {max(row['kl_by_window']):.2g})",
            f"{row['perplexity_change_percent']:+.2f} %",
            f"{row['decode_gb_per_s_1_core']['median']:.2g}",
        ]
        for name, row in result["variants"].items()
    ]
    head = ["", "bits", "KL (least to most)", "perplexity", "decode GB/s, 1 core"]
    return {"variants": table(head, rows, right=True)}


def _losses(rows: dict[str, dict[str, Any]]) -> str:
    head = [
        *("codec", "bits", "error of K", "error of V", "error (most)"),
        *("KL (least to most)", "KL / error²", "top-1 the same", "perplexity (95 %)"),
    ]
    found = []
    for name, row in rows.items():
        low, high = row["perplexity_change_interval"]
        found.append(
            [
                name,
                f"{row['bits_per_number']:.2f}",
                *(_percent(row[key]) for key in ("error_k", "error_v")),
                f"{_percent(row['error'])} ({_percent(row['error_most'])})",
                f"{row['kl']:.2g} ({min(row['kl_by_window']):.2g} to "
                f"{max(row['kl_by_window']):.2g})",
                f"{row['kl'] / row['error'] ** 2:.2f}" if row["error"] else "",
                f"{100 * row['top1_same']:.2f} %",
                f"{row['perplexity_change_percent']:+.3f} % ({low:+.3f} to {high:+.3f})",
            ]
        )
    return table(head, found, right=True)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share else "0"


def _is_setting(name: str) -> bool:
    """Whether a row is of `settings_of_zstd`, not of a codec: those have a space in their name."""
    return " " in name and name != COPY


def speed_tables(result: dict[str, Any]) -> dict[str, str]:
    """Marker in the document -> what belongs there."""
    first = result["shapes"][0]["name"]
    found = {"sizes": sizes(result), "zstd": zstd(result), "speed": speed(result, first)}
    return found | {"choice": choice(result)}


def losses(result: dict[str, Any]) -> dict[str, str]:
    """Marker in the document -> what belongs there."""
    found = {
        "quality": quality(result),
        "sink": sink(result),
        "ranks": ranks(result),
    }
    bare = result["bare"]
    found["bare"] = (
        f"With exact KV its perplexity is {bare['perplexity']:.2f}, without the prefix "
        f"{bare['perplexity_without_prefix']:.2f}: that is how much there is to lose."
    )
    return found
