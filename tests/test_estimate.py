"""`monarch-rocm plan`: costs of a layer for several numbers of blocks, before anything runs."""

import json
import statistics
from pathlib import Path

import pytest
import torch

from monarch_rocm import MonarchLinear, cli, plan
from monarch_rocm.estimate import DEVICES, dense, monarch

ROOT = Path(__file__).parent.parent


def test_costs_are_those_of_the_layer():
    """The same numbers as a real layer and its plan give."""
    layer = MonarchLinear(96, 72, bias=False, nblocks=(4, 2), rank=3, dtype=torch.bfloat16, backend="torch")
    found = monarch(96, 72, (4, 2), 3, "interleaved", 50, DEVICES["h200"])
    planned = plan(layer, tokens=50)
    assert found.parameters == sum(p.numel() for p in layer.parameters())
    assert (found.flops, found.bytes) == (planned.flops, planned.bytes)
    assert dense(96, 72, 50, DEVICES["h200"]).flops == 2 * 50 * 96 * 72


def test_time_is_the_larger_of_bytes_and_flops_of_each_launch():
    rates = DEVICES["h200"]
    few, many = (monarch(4096, 4096, 4, None, "blocked", tokens, rates).seconds for tokens in (1, 65536))
    assert few == pytest.approx(2 * (4096 * 1024 + 2 * 4096) * 2 / rates.copy)
    assert many == pytest.approx(2 * 2 * 65536 * 4096 * 1024 / rates.product)
    both = monarch(4096, 4096, 4, None, "interleaved", 65536, rates).seconds
    assert both - many == pytest.approx(2 * 65536 * 4096 * 2 / rates.copy)


def test_measured_rates_are_those_of_the_results():
    found = json.loads((ROOT / "benchmarks/results/h200.json").read_text())["ceilings"]
    assert DEVICES["h200"].copy == pytest.approx(found["copy_bytes_per_s"], rel=1e-3)
    assert DEVICES["h200"].product == pytest.approx(found["product_flops_per_s"], rel=1e-3)


@pytest.mark.parametrize(
    ("device", "arch"), [("mi250x", "gfx90a"), ("mi300x", "gfx942"), ("mi355x", "gfx950")]
)
def test_rates_of_data_sheets_are_those_of_the_other_model(device, arch):
    """One set of AMD's numbers in the repository, and never shown as measured."""
    chip = json.loads((ROOT / "benchmarks/cdna_tune/chips.json").read_text())["chips"][arch]
    assert DEVICES[device].copy == chip["memory"]
    product = chip["units"] * chip["clock"] * chip["flops"]["2"]
    assert DEVICES[device].product == pytest.approx(product, rel=2e-3)
    assert not DEVICES[device].measured
    assert "data sheet" in DEVICES[device].source
    assert "nothing was run on AMD hardware" in DEVICES[device].source


def test_what_the_guide_says_of_the_prediction():
    """docs/choosing.md compares the model with the H200's results; the figures are recomputed here."""
    rows = json.loads((ROOT / "benchmarks/results/h200.json").read_text())["rows"]
    ratios = {"large": [], "small": []}
    for row in rows:
        if row["kind"] == "forward" and row["run"] == "auto":
            sizes = row["in_features"], row["out_features"], row["nblocks"], None, row["layout"]
            found = monarch(*sizes, row["tokens"], DEVICES["h200"]).seconds * 1e6 / row["p50_us"]
            ratios["large" if row["tokens"] >= 8192 else "small"].append(found)
    large, small = ratios["large"], ratios["small"]
    said = " ".join((ROOT / "docs/choosing.md").read_text().split())
    assert (
        f"in {len(large)} forward passes of 8,192 tokens or more it predicts {min(large):.2f} to "
        f"{max(large):.2f} of the measured time, {statistics.median(large):.2f} in the median"
    ) in said
    assert f"in {len(small)} of 64 to 2,048 tokens {min(small):.2f} to {max(small):.2f}" in said


def run(capsys, *arguments):
    status = cli.main(["plan", *arguments])
    return status, capsys.readouterr()


def test_table_fits_a_terminal_and_says_what_it_is(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, printed = run(capsys, "4096", "14336", "--device", "mi300x")
    said = " ".join(printed.out.split())
    assert status == 0
    assert "…" not in printed.out
    assert "Time is that of a model" in said
    assert "nothing was run on AMD hardware" in said
    assert "18,874,368 32.1%" in said


def test_unwise_numbers_of_blocks_are_shown_only_when_named(capsys):
    _, printed = run(capsys, "64", "64")
    assert [line.split()[0] for line in printed.out.splitlines() if "%" in line] == ["dense", "2", "4", "8"]
    _, printed = run(capsys, "64", "64", "--nblocks", "1", "16")
    assert "1 blocks: more parameters than dense" in printed.out
    assert "16 blocks: 75% of the dense weight is always zero" in printed.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("0", "4"), "in_features must be at least 1"),
        (("4", "4", "--nblocks", "1,2,3"), "a pair (K, L)"),
        (("4", "4", "--tokens", "0"), "--tokens must be at least 1"),
        (("4", "4", "--rank", "0"), "rank must be at least 1"),
    ],
    ids=["width", "nblocks", "tokens", "rank"],
)
def test_bad_sizes_are_refused(capsys, arguments, said):
    status, printed = run(capsys, *arguments)
    assert status == 2
    assert said in printed.err
