"""The command `monarch-rocm`."""

import subprocess
import sys

import pytest
import torch

import monarch_rocm
from monarch_rocm import MonarchShape, cli, dispatch, tune


def test_doctor_prints_what_a_bug_report_needs(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for name in ("monarch-rocm", "python", "torch", "triton", "runtime", "device", "auto in bfloat16"):
        assert f"\n{name}" in f"\n{out}"
    assert torch.__version__ in out
    assert monarch_rocm.__version__ in out
    assert "MONARCH_ROCM_CACHE_DIR" in out
    assert "MONARCH_ROCM_AUTOTUNE" in out
    assert "configs" in out


@pytest.mark.parametrize("backend", ["triton", "nonsense"])
def test_doctor_survives_a_bad_environment(capsys, monkeypatch, backend):
    monkeypatch.setenv("MONARCH_ROCM_BACKEND", backend)
    assert cli.main(["doctor"]) == 0
    assert f"MONARCH_ROCM_BACKEND{' ' * 4}{backend}" in capsys.readouterr().out


def test_module_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "monarch_rocm", "doctor"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("monarch-rocm")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["bench", "tune"])
def test_measuring_without_a_gpu_says_so(command, capsys):
    assert cli.main([command]) == 1
    assert f"monarch-rocm {command} needs a ROCm or CUDA GPU" in capsys.readouterr().err


@pytest.fixture
def asked(monkeypatch):
    """What `tune` was asked for, on a machine that seems to have a GPU."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dispatch, "triton_state", lambda: ("3.9.0", None))
    monkeypatch.setattr(tune, "tune", lambda *args: calls.append(args))
    return calls


def test_tune_takes_layers_in_either_form(asked):
    more = ["--layer", "96,64", "--layer", "64,64", "--nblocks", "2,4", "--rank", "8", "--layout", "blocked"]
    assert cli.main(["tune", "64", "96", *more, "--tokens", "1", "9", "--train", "--dtype", "float16"]) == 0
    ((shapes, tokens, dtype, device, train, rounds, _),) = asked
    sizes = ((64, 96), (96, 64), (64, 64))
    assert shapes == [MonarchShape(*each, (2, 4), 8, "blocked") for each in sizes]
    assert (tokens, dtype, str(device), train, rounds) == ([1, 9], torch.float16, "cuda:0", True, 20)
    assert cli.main(["tune", "--layer", "64,96", "--nblocks", "8"]) == 0
    assert asked[1][0] == [MonarchShape(64, 96, 8)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no layer was given: write IN OUT"),
        (["64"], "two sizes, IN and OUT, but (64,) was given"),
        (["--layer", "64,96,32"], "but (64, 96, 32) was given"),
        (["64", "0"], "out_features must be at least 1"),
        (["64", "96", "--nblocks", "2,3,4"], "nblocks must be an int or a pair"),
        (["64", "96", "--rank", "0"], "rank must be at least 1"),
        (["64", "96", "--tokens", "8", "0"], "--tokens must be at least 1, but 0 was given"),
        (["64", "96", "--rounds", "3"], "--rounds must be at least 4, but 3 was given"),
    ],
)
def test_tune_says_what_was_given_and_what_fits(asked, capsys, arguments, said):
    assert cli.main(["tune", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert asked == []


def test_tune_refuses_what_is_no_number(asked, capsys):
    with pytest.raises(SystemExit):
        cli.main(["tune", "--layer", "64xa"])
    assert "'64xa' is no number and no pair such as 4096,14336" in capsys.readouterr().err


def test_tune_needs_triton(asked, monkeypatch, capsys):
    monkeypatch.setattr(dispatch, "triton_state", lambda: ("3.2.0", "Triton 3.2.0 is older than 3.4"))
    assert cli.main(["tune", "64", "96"]) == 1
    assert "Triton 3.2.0 is older than 3.4" in capsys.readouterr().err


def test_tune_that_stops_says_why(asked, monkeypatch, capsys):
    def stop(*args):
        raise OSError("read-only file system")

    monkeypatch.setattr(tune, "tune", stop)
    assert cli.main(["tune", "64", "96"]) == 1
    assert "kept what it had found: read-only file system" in capsys.readouterr().err


def test_unknown_commands_are_refused():
    with pytest.raises(SystemExit) as exit:
        cli.main(["nonsense"])
    assert exit.value.code == 2
