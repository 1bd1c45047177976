"""The kernels compile for the three CDNA targets, here, without ROCm. Nothing runs on AMD hardware.

Triton's wheel holds the AMD code generator. It must not be in interpreter mode, so this compiles in
a process of its own.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

COMPILE = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from monarch_rocm.kernels import bdmm, bdmm_wgrad, tuning

arch, itemsize = sys.argv[1], sys.argv[2]
dtype = {"2": "bf16", "4": "fp32"}[itemsize]
# GPUs name a token stride and a feature stride of 1; a multiple of 16 where a row is one.
SHAPES = {
    "4096 in 4 blocks": (4, 1024, 1024, 4),
    "1000 in 8, padded": (8, 125, 125, 8),
    "64 blocks": (64, 64, 64, 64),
}
for name, (blocks, n_out, n_in, group) in SHAPES.items():
    for module in (bdmm, bdmm_wgrad):
        kernel = getattr(module, module.__name__.rpartition(".")[2] + "_kernel")
        table = kernel.__name__.removesuffix("_kernel")
        config = dict(tuning._lookup(table, arch, int(itemsize), n_out, n_in, 8192))
        constants = dict(BLOCKS=blocks, N_IN=n_in, N_OUT=n_out, WIDE=False)
        if module is bdmm:
            pointers, strides = ["x", "w", "bias", "y"], ["stride_x_f", "stride_w_i"]
            constants |= dict(IN=blocks * n_in, OUT=blocks * n_out - 1, HAS_BIAS=True)
            constants |= dict(GROUP_IN=1, GROUP_OUT=group)
        else:
            pointers, strides = ["g", "a", "dw"], ["stride_g_f", "stride_a_f"]
            constants |= dict(G_FEATURES=blocks * n_out, A_FEATURES=blocks * n_in - 1)
            constants |= dict(GROUP_OUT=group, GROUP_IN=1)
            config.pop("PROGRAMS"), config.pop("MIN_STEPS")
        options = {key: config.pop(key) for key in ("num_warps", "num_stages")}
        constants |= config | {stride: 1 for stride in strides}
        signature, attributes = {}, {}
        for position, argument in enumerate(kernel.arg_names):
            if argument in constants:
                signature[argument] = "constexpr"
            elif argument in pointers:
                signature[argument] = "*" + dtype
                attributes[(position,)] = [["tt.divisibility", 16], ["tt.pointer_range", 32]]
            else:
                signature[argument] = "i32"
        source = ASTSource(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget("hip", arch, 64), options=options)
        assembly = compiled.asm["amdgcn"]
        spills = [int(line.split(":")[1]) for line in assembly.splitlines() if "_spill_count:" in line]
        print(json.dumps({
            "kernel": kernel.__name__, "shape": name, "spills": sum(spills),
            "lds": compiled.metadata.shared, "mfma": assembly.count("v_mfma_"),
            "xf32": assembly.count("xf32"), "atomics": assembly.count("atomic"),
        }))
"""


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
@pytest.mark.parametrize("itemsize", ["2", "4"])
def test_kernels_compile_for_cdna_without_spills(arch, itemsize, tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, arch, itemsize],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 6
    for row in rows:
        assert row["spills"] == 0, row
        assert row["lds"] <= (160 if arch == "gfx950" else 64) * 1024, row
        assert row["mfma"] > 0, row
        assert row["xf32"] == 0, row
        assert row["atomics"] == 0, row
