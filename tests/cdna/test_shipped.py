"""Shipped kernels with shipped configs, compiled for CDNA and executed: a set that every test run can afford.

`make test-cdna` runs all of them. Nothing runs on AMD hardware; what that leaves open stands in the
package's docstring.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", minversion="3.4")
from cdna import cases, compiler, layers
from monarch_rocm.kernels import tuning

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="launches are taken from Triton's interpreter"),
]


def test_every_kernel_has_a_case():
    assert set(cases.MAKERS) == set(tuning.PARAMETERS)


def test_every_row_of_every_table_can_be_reached():
    for case in cases.every_case():
        if case.kernel != "fused":
            cases.sizes_of(case)


def test_the_set_holds_every_row_and_every_way_of_running():
    """Each row of each table; each architecture with each dtype and each way of addressing."""
    chosen, every = cases.some_cases(), cases.every_case()
    for of in (
        lambda case: (case.kernel, str(case.config)),
        lambda case: (case.arch, case.dtype, case.addressing),
        lambda case: (case.kernel, case.arch),
    ):
        assert {of(case) for case in chosen if case.kernel != "fused"} == {
            of(case) for case in every if case.kernel != "fused"
        }


@pytest.mark.parametrize("case", cases.some_cases(), ids=str)
def test_a_shipped_config_is_right(case):
    cases.try_case(case)


@pytest.mark.parametrize("case", layers.some_layers(), ids=str)
def test_a_layer_and_its_gradients_are_right(case):
    found = layers.try_layer(case)
    kernels = {launch.kernel for launch in found["launches"]}
    assert ("bdmv_kernel" if case.tokens <= cases.FEW else "bdmm_kernel") in kernels
    assert "bdmm_wgrad_kernel" in kernels


def test_what_one_launch_asks_of_triton_reaches_no_other():
    """Even where the first of a run asks: the compiling process starts before it."""
    compiler.process().kill()
    compiler.process.cache_clear()
    compiler._ask.cache_clear()
    asks = next(case for case in cases.every_case() if (case.arch, case.dtype.itemsize) == ("gfx90a", 2))
    cases.try_case(asks)
    variables = Path(f"/proc/{compiler.process().pid}/environ").read_text().split("\0")
    options = {name for name in os.environ if name.startswith("TRITON_HIP")}
    assert {each.partition("=")[0] for each in variables if each.startswith("TRITON_HIP")} == options


def census(folder, *more):
    """The command behind `make test-cdna`, on one kernel of one architecture."""
    command = [sys.executable, "-m", "cdna.census", str(folder), "--jobs", "1"]
    return subprocess.run(
        [*command, "--only", "fused-0-float32-gfx942", *more],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_census_writes_its_results(tmp_path):
    done = census(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = tmp_path / "cdna.json"
    found = json.loads(results.read_text())
    assert found["runs"] == found["right"] == len(cases.ADDRESSING)
    assert all(0 < row["seen"] <= row["put_in"] for row in found["faults"])
    rows = (tmp_path / "cdna.csv").read_text()
    assert len(rows.splitlines()) == 1 + found["runs"]

    # A config that was not run, or not right, runs again, and all else is kept.
    other, wrong, *kept = rows.splitlines()[1:]
    assert wrong.count(",True,") == 1
    before = [
        rows.splitlines()[0],
        other.replace('""BT"": ', '""BT"": 9'),
        wrong.replace(",True,", ",False,"),
    ]
    (tmp_path / "cdna.csv").write_text("\n".join([*before, *kept]) + "\n")
    done = census(tmp_path, "--changed")
    assert "2 of them new" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "cdna.csv").read_text() == rows
    assert json.loads(results.read_text()) == found

    results.write_text(results.read_text().replace(found["sources"], "others"))
    done = census(tmp_path, "--changed")
    assert done.returncode != 0
    assert "census of sources others" in done.stderr
