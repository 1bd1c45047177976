"""Examples in docstrings and in the README run and print what they say."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import monarch_rocm

ROOT = Path(__file__).parent.parent
MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(monarch_rocm.__path__, "monarch_rocm.")
    if not name.startswith("monarch_rocm.kernels") and not name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:a Monarch layer")
def test_docstring_examples(name):
    module = importlib.import_module(name)
    public = {key: getattr(monarch_rocm, key) for key in monarch_rocm.__all__}
    extra = {"torch": torch, "nn": nn, "monarch_rocm": monarch_rocm, **public}
    extra = {key: value for key, value in extra.items() if not hasattr(module, key)}
    failed, _ = doctest.testmod(module, extraglobs=extra, optionflags=doctest.ELLIPSIS)
    assert failed == 0


@pytest.mark.parametrize("name", monarch_rocm.__all__)
def test_public_names_have_an_example(name):
    assert ">>> " in getattr(monarch_rocm, name).__doc__


def test_readme_examples():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_readme_commands_are_make_targets():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"`?make ([\w-]+)", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= named <= targets
