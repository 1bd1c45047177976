"""Memory that 32-bit byte offsets do not reach, and hidden features that pass through memory.

Triton addresses a tensor by buffer instructions, whose offsets are 32 bits of bytes, where it was told
that its storage is below 2 GiB or can bound the offsets itself. The kernels count elements in 32 bits
up to 2**31 of them, which for two bytes each is 4 GiB.
"""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", minversion="3.4")
from cdna.backend import ARCHS, on_cdna
from cdna.mutations import subject, without
from monarch_rocm.kernels import bdmm, bdmm_wgrad, bdmv, chained, fused, interleave, launch, tuning

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="launches are taken from Triton's interpreter"),
]
by_arch = pytest.mark.parametrize("arch", ARCHS)
TILES = {"BT": 16, "BO": 16, "BI": 16, "num_warps": 1, "num_stages": 1}
STRIDE = 2**27  # between rows: 4 GiB of storage, whose elements have numbers below 2**31


def far(x):
    """The same numbers, rows that far apart; pages that are not touched take no memory."""
    spread = torch.empty((len(x) - 1) * STRIDE + x.shape[1], dtype=x.dtype)
    spread = spread.as_strided(x.shape, (STRIDE, 1)).copy_(x)
    assert not tuning.is_wide(spread)
    assert spread.untyped_storage().nbytes() >= 2**31
    return spread


def product(x, w, y):
    """Of `bdmm`, into outputs that lie as the inputs do."""
    tensors, scalars, strides, constants = bdmm.stage_arguments(x, w, None, y, 1, 1, TILES)
    launch.launch(bdmm.bdmm_kernel, 1, tensors, scalars, strides, constants)
    return y


PASS = {"BT": 4, "BR": 4, "BC": 4, "num_warps": 1, "num_stages": 1}
ONE = TILES | {"PROGRAMS": 1}
CALLS = {
    "bdmm": product,
    "bdmv": lambda x, w, y: bdmv.bdmv(x, w, None, 16, 1, 1, False, TILES),
    "bdmm_wgrad": lambda x, w, y: bdmm_wgrad.bdmm_wgrad(x, x, 1, 16, 16, 1, 1, ONE | {"MIN_STEPS": 1}),
    "interleave": lambda x, w, y: interleave.interleave(x, 4, 4, 16, None, PASS),
    "chained": lambda x, w, y: chained.chained(x, w, w, None, 16, ONE),
    "fused": lambda x, w, y: fused.fused(
        x, w, w, None, 16, False, False, {name: TILES[name] for name in ("BT", "num_warps", "num_stages")}
    )[0],
}


@by_arch
@pytest.mark.parametrize("kernel", CALLS)
def test_tensors_past_2_gib(arch, kernel):
    """Reads and writes stay inside the tensor, between whose rows lie red zones of 256 MiB."""
    x, w = torch.randn(16, 16).half(), torch.randn(1, 16, 16).half()
    y, far_x, far_y = torch.zeros_like(x), far(x), far(torch.zeros_like(x))
    with on_cdna(arch):
        near, spread = CALLS[kernel](x, w, y), CALLS[kernel](far_x, w, far_y)
    assert torch.equal(near, spread)


def test_a_launch_is_remembered_for_storage_on_one_side_of_2_gib(monkeypatch):
    """Buffer instructions compiled for a small storage must not address a large one."""
    compiled = []

    class Kernel:
        arg_names = ("x", "tokens", "stride", "BT")
        function = packed_metadata = None

        def __getitem__(self, grid):
            return lambda *args, **constants: compiled.append(args[0]) or self

        def run(self, *arguments):
            pass

    monkeypatch.setattr(torch.version, "hip", "6.4")
    stream = SimpleNamespace(get_current_stream=lambda device: 0)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=stream))
    kernel, constants = Kernel(), launch.Constants(BT=16)
    for elements, known in ((8, 1), (2**30 - 1, 1), (2**30, 2), (8, 2), (2**30 + 8, 2)):
        x = torch.empty(elements, dtype=torch.float16)[:8]
        launch.launch(kernel, 1, (x,), (5,), (1,), constants)
        assert len(compiled) == known


@by_arch
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hidden_features_in_memory_are_guarded_by_a_barrier(arch, dtype):
    """What `chained` relies on: stores and loads stay on their sides of the barrier, and waves of a
    workgroup share a CU and with it the cache that all of them go through. Then LLVM's memory model
    wants nothing else at that scope, no wait and no invalidation (AMDGPUUsage, memory models of gfx90a
    and gfx942: "work-group", outside of threadgroup split mode).
    """
    x, w = torch.randn(64, 128).to(dtype), torch.randn(2, 64, 64).to(dtype)
    # The first tile that the second stage reads has numbers of the last one that the first stage wrote.
    config = {"BT": 64, "BO": 32, "BI": 64, "PROGRAMS": 1, "num_warps": 4, "num_stages": 2}
    found = subject(arch, lambda: chained.chained(x, w, w, None, 128, config), "y")
    assert found.outcome() == "right"
    assert ".amdhsa_tg_split 0" in found.compiled.assembly
    outcomes = [found.outcome(program) for _, program in without(found.program, "s_barrier")]
    # There is one such barrier, and no other stands in for it.
    assert sum("memory that another wave wrote" in outcome for outcome in outcomes) == 1
