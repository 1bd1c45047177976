"""The training study appends a row a run, goes on where it stopped, and its report reads the rows."""

import csv
import dataclasses
import math
import sys

import pytest
import torch
import train_report
import train_study
from train_study import Run

from monarch_rocm import MonarchLinear
from monarch_rocm.optim import param_groups

TINY = {"width": 16, "steps": 6, "layers": 1, "head_size": 8, "context": 16, "tokens": 64}
RUNS = [
    Run("dense", **TINY),
    Run("monarch", nblocks=2, options="caps", **TINY),
    Run("monarch", nblocks=2, optimizer="muon", options="guided+blocked", **TINY),
]


@pytest.fixture
def study(monkeypatch, tmp_path):
    """Run the study's command on tiny runs and a tiny text; returns the rows of its CSV."""
    text = torch.frombuffer(bytearray(bytes(range(32, 127)) * 40), dtype=torch.uint8)
    monkeypatch.setattr(train_study, "gather", lambda limit, device: [text, text])
    monkeypatch.setattr(train_study, "EVALUATED", 256)

    def run(runs, *arguments):
        monkeypatch.setattr(train_study, "grids", lambda: {"tiny": runs})
        out = tmp_path / "rows.csv"
        line = ["study", "--grid", "tiny", "--device", "cpu", "--workers", "1", "--out", str(out)]
        monkeypatch.setattr(sys, "argv", [*line, *arguments])
        train_study.main()
        return train_study.read_rows(out)

    return run


def test_a_finished_run_is_not_done_again(study):
    first = study(RUNS[:2])
    rows = study(RUNS)
    assert rows[:2] == first
    assert [row["linear"] for row in rows] == ["dense", "monarch", "monarch"]
    assert study(RUNS) == rows
    assert all(math.isfinite(float(row["validation_loss"])) for row in rows)
    assert all(int(row["steps_done"]) == 6 for row in rows)


def test_no_run_begins_after_the_time_is_up(study):
    assert study(RUNS, "--minutes", "0") == []


def test_rows_of_another_recipe_are_not_mixed_with_new_ones(study, capsys):
    study([dataclasses.replace(RUNS[0], recipe=1)])
    with pytest.raises(SystemExit):
        study(RUNS[:1])
    assert "rows of another recipe" in capsys.readouterr().err


def test_a_failing_run_does_not_stop_the_others(study, capsys):
    rows = study([dataclasses.replace(RUNS[0], head_size=7), RUNS[1]])
    assert [row["linear"] for row in rows] == ["monarch"]
    assert "no multiple of the head size 7" in capsys.readouterr().out


def test_rates_are_multiples_of_the_unit():
    run = dataclasses.replace(RUNS[1], times=4.0, lr=1e-3)
    model = train_study.build(run, "cpu")
    (adamw,) = train_study.optimizers(run, model, "cpu")
    rates = {id(p): g["lr"] for g in adamw.param_groups for p in g["params"]}
    layer, wide = model.blocks[0].up, (512 / 16) ** 0.5
    assert isinstance(layer, MonarchLinear)
    assert rates[id(layer.blkdiag1)] == pytest.approx(1e-3 * 4 * 2**0.5 * wide)
    assert rates[id(model.head.weight)] == pytest.approx(1e-3 * wide)
    assert rates[id(model.bytes.weight)] == 1e-3
    assert sorted(rates) == sorted(id(p) for p in model.parameters())


def test_flops_are_those_of_products_and_causal_attention():
    run = dataclasses.replace(RUNS[0], steps=1)
    model = train_study.build(run, "meta")
    tokens, width, context = 64, 16, 16
    products = 12 * width**2 + 256 * width
    attention = sum(2 * (i + 0.5) * width for i in range(context)) / context
    assert train_study.training_flops(run, model) == 3 * 2 * tokens * (products + attention)


@pytest.mark.parametrize("grid", train_study.grids())
@pytest.mark.filterwarnings("ignore:a Monarch layer")
def test_all_runs_can_be_built(grid):
    runs = train_study.grids()[grid]
    assert runs
    for run in dict.fromkeys(runs):
        model = train_study.build(run, "meta")
        assert train_study.training_flops(run, model) > 0


def test_monarch_runs_cost_no_more_than_the_dense_ones_that_they_stand_beside():
    def cost(run):
        model = train_study.build(run, "meta")
        return train_study.training_flops(run, model), train_study.block_parameters(model)

    seen = 0
    for runs in (train_study.grids()[name] for name in ("main", "scout", "budgets")):
        flops, parameters = cost(next(run for run in runs if run.linear == "dense"))
        for found in (cost(run) for run in runs if run.linear == "monarch"):
            assert found[0] <= flops
            assert found[0] > 0.85 * flops or found[1] <= parameters / 2
            seen += 1
    assert seen > 10


@pytest.mark.parametrize("nblocks", [0, 4, 8])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_rates_told_are_those_that_the_package_gives(nblocks, optimizer):
    """The report's `lr`, given to `param_groups` with a base width of 512, is what the run had."""
    run = Run("monarch" if nblocks else "dense", 128, nblocks, optimizer=optimizer, times=3.0, head_size=32)
    model = train_study.build(run, "meta")
    found = train_study.optimizers(run, model, "cpu")[0].param_groups
    had = {id(p): group["lr"] for group in found for p in group["params"]}
    row = dataclasses.asdict(run) | {"block_parameters": 1, "training_flops": 1, "validation_loss": 1}
    lr = train_report.Entry([row]).rate
    for group in param_groups(model.blocks, lr, base_width=512, matrices=optimizer == "muon"):
        for parameter in (p for p in group["params"] if p.ndim > 1):
            assert had[id(parameter)] == pytest.approx(group["lr"])


def test_the_report_shows_means_and_spreads(tmp_path, monkeypatch):
    names = [field.name for field in dataclasses.fields(Run)]
    more = {"block_parameters": 5, "training_flops": 1e15, "workers": 3, "seconds": 1.0}
    more |= {"device": "a GPU", "torch": "2", "date": "2026-01-01"}
    runs = [(Run(seed=s), loss) for s, loss in ((0, 0.61), (1, 0.63))] + [(Run(times=4.0), math.nan)]
    runs += [(Run("monarch", nblocks=4), 0.65)]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*names, *more, "validation_loss"])
        writer.writeheader()
        for run, loss in runs:
            writer.writerow(dataclasses.asdict(run) | more | {"validation_loss": loss})
    monkeypatch.setattr(train_report, "ROOT", tmp_path)
    text, entries = train_report.markdown(path)
    assert "0.6200 ± 0.0141" in text
    assert "+0.0300" in text
    assert "diverged" in text
    train_report.plot(entries, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
