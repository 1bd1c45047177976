"""The command `monarch-rocm`."""

import subprocess
import sys

import pytest
import torch

import monarch_rocm
from monarch_rocm import cli


def test_doctor_prints_what_a_bug_report_needs(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for name in ("monarch-rocm", "python", "torch", "triton", "runtime", "device", "auto in bfloat16"):
        assert f"\n{name}" in f"\n{out}"
    assert torch.__version__ in out
    assert monarch_rocm.__version__ in out
    assert "MONARCH_ROCM_CACHE_DIR" in out
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
def test_bench_without_a_gpu_says_so(capsys):
    assert cli.main(["bench"]) == 1
    assert "needs a ROCm or CUDA GPU" in capsys.readouterr().err


def test_unknown_commands_are_refused():
    with pytest.raises(SystemExit) as exit:
        cli.main(["nonsense"])
    assert exit.value.code == 2
