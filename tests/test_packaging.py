"""What a user installs: the names inside, imports without torch or Triton, no device touched."""

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import monarch_rocm

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    f"monarch_rocm/{path.relative_to(ROOT / 'monarch_rocm')}"
    for path in (ROOT / "monarch_rocm").rglob("*.py")
) + sorted(
    f"monarch_rocm/kernels/{path.relative_to(ROOT / 'kernels')}" for path in (ROOT / "kernels").rglob("*.py")
)
MODULES = sorted(set(MODULES))


def python(code, cwd, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "TRITON_INTERPRET": "0", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_kernels_are_reached_by_the_symlink():
    link = ROOT / "monarch_rocm" / "kernels"
    assert link.is_symlink()
    assert os.readlink(link) == "../kernels"
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_version_is_that_of_the_metadata():
    assert importlib.metadata.version("monarch-rocm") == monarch_rocm.__version__


def test_base_dependencies_name_neither_torch_nor_triton():
    base = [r for r in importlib.metadata.requires("monarch-rocm") if "extra ==" not in r]
    assert base
    assert not [r for r in base if r.startswith(("torch", "triton", "pytorch"))]
    rocm = [r for r in importlib.metadata.requires("monarch-rocm") if 'extra == "rocm"' in r]
    assert rocm == []


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return folder


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"monarch_rocm"}
    assert sorted(n for n in names if n.endswith(".py")) == MODULES
    tables = [n for n in names if n.endswith(".json")]
    kept = [
        *(ROOT / "kernels" / "configs").rglob("*.json"),
        *(ROOT / "monarch_rocm").glob("*.json"),
        *(ROOT / "monarch_rocm" / "codegen").glob("*.json"),
    ]
    assert len(tables) == len(kept)
    assert "monarch_rocm/py.typed" in names


@pytest.mark.slow
def test_sdist_builds_the_same_wheel(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert set(MODULES) <= set(names)
    assert {"LICENSE", "README.md", "pyproject.toml"} <= set(names)


@pytest.mark.slow
def test_installed_wheel_works_away_from_the_checkout(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import torch, monarch_rocm\n"
        f"assert monarch_rocm.__file__.startswith({str(site)!r}), monarch_rocm.__file__\n"
        "layer = monarch_rocm.MonarchLinear(8, 8, nblocks=2)\n"
        "x = torch.randn(3, 8)\n"
        "torch.testing.assert_close(layer(x), layer.to_linear()(x))\n"
        "from monarch_rocm.kernels import tuning\n"
        "assert tuning.table('bdmm', 'none')[1]\n"
        "from monarch_rocm.kernels import space\n"
        "assert space.candidates('bdmm', rocm=True)\n"
    )
    done = python(code, tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr


def test_import_without_torch_explains_itself(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    done = python("import monarch_rocm", tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 1
    assert "never installs itself" in done.stderr
    assert "whl/rocm" in done.stderr
    assert done.stderr.count("Traceback") == 1


def test_import_and_torch_path_without_triton(tmp_path):
    code = (
        "import sys, importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *a: None if n == 'triton' else real(n, *a)\n"
        "sys.modules['triton'] = None\n"
        "import torch, monarch_rocm as m\n"
        "layer = m.MonarchLinear(8, 8, nblocks=2)\n"
        "layer(torch.randn(3, 8)).sum().backward()\n"
        "try: m.monarch_linear(torch.ones(1, 8), layer.blkdiag1, layer.blkdiag2, backend='triton')\n"
        "except RuntimeError as error: print(error)\n"
        "from monarch_rocm import cli\n"
        "cli.main(['doctor'])\n"
    )
    done = python(code, tmp_path, PYTHONPATH=str(ROOT), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert "Triton is not installed" in done.stdout


def test_import_initialises_no_device_and_forks():
    code = (
        "import os, monarch_rocm, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "    x = torch.ones(2, 8, device=device)\n"
        "    monarch_rocm.MonarchLinear(8, 8, nblocks=2, device=device)(x).sum().item()\n"
        "    os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
    done = python(code, ROOT)
    assert done.returncode == 0, done.stderr


def test_optional_packages_are_not_imported():
    code = (
        "import sys, monarch_rocm, monarch_rocm.reference, monarch_rocm.integrations.transformers\n"
        "print(*sys.modules)"
    )
    done = python(code, ROOT)
    assert done.returncode == 0, done.stderr
    assert not {"transformers", "peft", "matplotlib", "torch._dynamo"} & set(done.stdout.split())
