"""Turn a results file of `monarch-rocm bench` into the README's table and into plots.

python benchmarks/report.py benchmarks/results/h200.json
"""

import argparse
import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
MARKS = ("<!-- measured: begin -->", "<!-- measured: end -->")
TITLES = {
    "forward": "forward",
    "train": "forward + backward",
    "decode": "generation, in a graph",
    "call": "host, a call",
    "call for gradients": "host, a call that records gradients",
    "stack": "training step of a GPT",
    "stack on the GPU": "its kernels alone",
}


def markdown(result, chosen=lambda row: True):
    """What `auto` reached against dense and the published op, a row a case, for the chosen rows."""
    found = result["environment"]
    ceilings = result["ceilings"]
    rows = result["rows"]
    lines = [
        f"Measured on one {found['device']} ({found['date']}, torch {found['torch']}, Triton "
        f"{found['triton']}, {rows[0]['dtype']}; copies at {ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"dense products at {ceilings['product_flops_per_s'] / 1e12:.0f} TFLOP/s) by "
        "`monarch-rocm bench`; median microseconds, all runs of a row in turns. The floor is the larger "
        "of bytes over copy rate and FLOPs over product rate, for a training step those of its three passes. "
        "The published op computes the interleaved layout in either row.",
        "",
        "| | in → out | tokens | blocks | layout | dense | published op | ours | speed-up | of floor |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    cases = {}
    for row in filter(chosen, rows):
        key = tuple(row[k] for k in ("kind", "in_features", "out_features", "tokens", "nblocks", "layout"))
        cases.setdefault(key, {})[row["run"]] = row
    for (kind, n_in, n_out, tokens, nblocks, layout), runs in cases.items():
        auto, other = runs["auto"], runs.get("published op")
        cells = [
            TITLES[kind],
            f"{n_in} → {n_out}",
            tokens,
            nblocks,
            layout,
            rounded(runs["dense"]["p50_us"]),
            rounded(other["p50_us"]) if other else "",
            rounded(auto["p50_us"]),
            f"{runs['dense']['p50_us'] / auto['p50_us']:.2f}",
            "" if auto["floor_us"] is None else f"{auto['floor_us'] / auto['p50_us']:.0%}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def rounded(value):
    """To four digits, without an exponent."""
    return f"{float(f'{value:.4g}'):,.10g}"


def in_readme(row):
    """Some of every kind; docs/benchmarks.md has them all."""
    many = row["kind"] != "forward" or row["tokens"] >= 8192
    blocks = (4, 8) if row["kind"].startswith("stack") else (4, 16, 64)
    return many and row["nblocks"] in blocks and row["tokens"] not in (4, 32768)


def insert(text, table, marks=MARKS):
    """`text` with the table between its marks."""
    pattern = re.compile(re.escape(marks[0]) + ".*?" + re.escape(marks[1]), re.S)
    assert pattern.search(text), f"the page has lost its marks, {marks[0]} and {marks[1]}"
    return pattern.sub(lambda _: f"{marks[0]}\n{table}\n{marks[1]}", text)


def plot(result, path):
    """Time over tokens and over blocks, each with its floor."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = [row for row in result["rows"] if row["kind"] == "forward" and row["in_features"] == 4096]
    rows = [row for row in rows if row["out_features"] == 4096 and row["layout"] == "interleaved"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    for nblocks, colour in ((4, "C0"), (16, "C1"), (64, "C2")):
        some = sorted((r for r in rows if r["nblocks"] == nblocks), key=lambda r: r["tokens"])
        auto = [r for r in some if r["run"] == "auto"]
        tokens = [r["tokens"] for r in auto]
        left.plot(tokens, [r["p50_us"] for r in auto], "o-", color=colour, label=f"{nblocks} blocks")
        left.plot(tokens, [r["floor_us"] for r in auto], ":", color=colour)
    dense = sorted((r for r in rows if r["nblocks"] == 4 and r["run"] == "dense"), key=lambda r: r["tokens"])
    left.plot([r["tokens"] for r in dense], [r["p50_us"] for r in dense], "k--", label="dense")
    left.set(xscale="log", yscale="log", xlabel="tokens", ylabel="µs", title="over tokens (dotted: floor)")
    left.legend()
    for run in ("dense", "published op", "compiled einsum", "torch", "auto"):
        some = [r for r in rows if r["tokens"] == 8192 and r["run"] == run]
        right.plot([r["nblocks"] for r in some], [r["p50_us"] for r in some], "o-", label=run)
    some = [r for r in rows if r["tokens"] == 8192 and r["run"] == "auto"]
    right.plot([r["nblocks"] for r in some], [r["floor_us"] for r in some], "k:", label="floor")
    right.set(xscale="log", yscale="log", xlabel="blocks", title="8192 tokens")
    right.set_xticks([4, 8, 16, 32, 64], ["4", "8", "16", "32", "64"])
    right.minorticks_off()
    right.legend()
    device = result["environment"]["device"]
    figure.suptitle(f"4096 → 4096 forward, interleaved, {rows[0]['dtype']}, {device}")
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    result = json.loads(arguments.results.read_text())
    readme = ROOT / "README.md"
    readme.write_text(insert(readme.read_text(), markdown(result, in_readme)))
    page = ROOT / "docs" / "benchmarks.md"
    page.write_text(insert(page.read_text(), markdown(result)))
    plot(result, arguments.results.with_suffix(".png"))


if __name__ == "__main__":
    main()
