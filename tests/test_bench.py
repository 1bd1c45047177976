"""The benchmark: its competitors compute what they claim, and documents say what the results file says."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from monarch_rocm import MonarchLinear, MonarchShape, bench, monarch_linear, stack, timing

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("report", ROOT / "benchmarks" / "report.py")
report = importlib.util.module_from_spec(spec)
spec.loader.exec_module(report)


def test_published_op_is_the_interleaved_layer():
    shape = MonarchShape(24, 36, 3)
    x, w1, w2 = (torch.randn(size) for size in ((5, 24), shape.factor1, shape.factor2))
    torch.testing.assert_close(bench.published(x, w1, w2), monarch_linear(x, w1, w2))


def test_floor_is_bytes_or_flops():
    case = bench.Case("forward", 4096, 4096, 8192, 4, "blocked")
    flops = 2 * 8192 * (4 * 1024 * 1024 * 2)
    assert bench.floor_us(case, torch.bfloat16, 4e12, 8e14) == pytest.approx(flops / 8e14 * 1e6)
    moved = 2 * (8192 * 8192 + 8 * 1024 * 1024)
    assert bench.floor_us(case, torch.bfloat16, 4e9, 8e14) == pytest.approx(moved / 4e9 * 1e6)


def test_cases_are_distinct():
    assert len(set(bench.CASES)) == len(bench.CASES)


@pytest.mark.parametrize(("page", "chosen"), [("README.md", report.in_readme), ("docs/benchmarks.md", None)])
def test_tables_are_those_of_the_results_file(page, chosen):
    result = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text())
    table = report.markdown(result, chosen) if chosen else report.markdown(result)
    text = (ROOT / page).read_text()
    assert report.insert(text, table) == text


def test_host_is_timed_in_turns_and_with_gradients_only_where_asked(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    for gradients in (False, True):
        seen.clear()
        runs = {name: lambda name=name: seen.append((name, torch.is_grad_enabled())) for name in "ab"}
        times = timing.measure_host(runs, 2, gradients)
        turn = [each for name in "ab" for each in ["wait"] + [(name, gradients)] * timing.CALLS]
        assert seen == turn * 5
        assert [len(values) for values in times.values()] == [2, 2]
        assert all(value > 0 for values in times.values() for value in values)


def test_stack_counts_its_own_parameters(monkeypatch):
    monkeypatch.setattr(stack, "DEPTH", 3)

    def monarch(n_in, n_out):
        return MonarchLinear(n_in, n_out, bias=False, nblocks=2)

    model = torch.nn.ModuleList(stack.Block(256, monarch) for _ in range(3))
    weights = [p for name, p in model.named_parameters() if "blkdiag" in name]
    assert stack.parameters(256, 2) == sum(weight.numel() for weight in weights)
    assert model[0](torch.randn(2, 5, 256)).shape == (2, 5, 256)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["forward", "train", "decode"])
def test_a_case_of_each_kind_is_measured(kind):
    case = bench.Case(kind, 64, 64, 4, 4, "interleaved")
    times = bench.measure(bench.competitors(case, torch.bfloat16, False), 2, kind == "train")
    assert {"dense", "auto", "torch"} <= set(times)
    assert all(value > 0 for values in times.values() for value in values)
