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
from monarch_rocm.kernels import bdmm, bdmm_wgrad, bdmv, fused, interleave, tuning

arch, itemsize = sys.argv[1], sys.argv[2]
dtype = {"2": "bf16", "4": "fp32"}[itemsize]
SHAPES = {
    "4096 in 4 blocks": (4, 1024, 1024, 4),
    "1000 in 8, padded": (8, 125, 125, 8),
    "64 blocks": (64, 64, 64, 64),
}



def compile(kernel, pointers, constants, config, name):
    config = {key: value for key, value in config.items() if key not in ("PROGRAMS", "MIN_STEPS")}
    options = {key: config.pop(key) for key in ("num_warps", "num_stages")}
    constants = constants | config
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


def config(kernel, *sizes):
    return tuning._lookup(kernel, arch, int(itemsize), *sizes)["config"]


for name, (blocks, n_out, n_in, group) in SHAPES.items():
    shape = dict(BLOCKS=blocks, N_IN=n_in, N_OUT=n_out, WIDE=False)
    shape_few = dict(BLOCKS=blocks, N_IN=n_in, N_OUT=n_out, IN=blocks * n_in, OUT=blocks * n_out - 1)
    shape_few |= dict(HAS_BIAS=True, WIDE=False, GROUP_IN=1, GROUP_OUT=n_out)
    compile(
        bdmm.bdmm_kernel, ["x", "w", "bias", "y"],
        shape | dict(IN=blocks * n_in, OUT=blocks * n_out - 1, HAS_BIAS=True, GROUP_IN=1, GROUP_OUT=group)
        | dict(stride_x_f=1, stride_w_i=1, stride_y_f=1),
        config("bdmm", n_out, n_in, 8192), name,
    )
    for tokens in (1, 16):
        compile(
            bdmv.bdmv_kernel, ["x", "w", "bias", "y"],
            shape_few | dict(stride_x_f=1, stride_w_i=1, stride_y_f=1),
            config("bdmv", n_out, n_in, tokens), f"{name}, {tokens} tokens",
        )
    compile(
        bdmm_wgrad.bdmm_wgrad_kernel, ["g", "a", "dw"],
        shape | dict(G_FEATURES=blocks * n_out, A_FEATURES=blocks * n_in - 1, GROUP_OUT=group, GROUP_IN=1)
        | dict(stride_g_f=1, stride_a_f=1),
        config("bdmm_wgrad", n_out, n_in, 8192), name,
    )
    compile(
        interleave.interleave_kernel, ["x", "bias", "y"],
        dict(IN=blocks * n_out, OUT=blocks * n_out - 1, ROWS=blocks, COLUMNS=n_out, HAS_BIAS=True)
        | dict(WIDE=False, stride_x_f=1),
        config("interleave", blocks, n_out, 8192), name,
    )
compile(
    fused.fused_kernel, ["x", "w1", "w2", "bias", "y", "h"],
    dict(IN=512, OUT=512, K=16, L=16, P=32, S=32, RANK=2, INTERLEAVED=True, HAS_BIAS=True, KEEP=True)
    | dict(WIDE=False, BP=32, BS=32, stride_x_f=1, stride_1_i=1, stride_2_i=1, stride_h_t=1),
    {"BT": 16, "num_warps": 4, "num_stages": 1}, "512 in 16 blocks",
)
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
    assert len(rows) == 16
    for row in rows:
        assert row["spills"] == 0, row
        assert row["lds"] <= (160 if arch == "gfx950" else 64) * 1024, row
        no_product = row["kernel"] == "interleave_kernel" or row["shape"].endswith(", 1 tokens")
        assert (row["mfma"] == 0) == no_product, row
        assert row["xf32"] == 0, row
        assert row["atomics"] == 0, row
