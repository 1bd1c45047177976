"""Kernels run on the GPU where there is one, else in Triton's interpreter on the CPU."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Decided when a kernel is decorated, so before the first import of one.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a ROCm or CUDA GPU"))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def poison(monkeypatch):
    """Fresh tensors hold NaN, so that an unwritten output shows."""
    from support import poison_fresh_tensors

    poison_fresh_tensors(monkeypatch)


@pytest.fixture(autouse=True, scope="session")
def mended_interpreter():
    from support import interpreter_mended

    with interpreter_mended():
        yield
