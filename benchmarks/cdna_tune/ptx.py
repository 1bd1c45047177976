"""The counts that `compiled` reads from AMD's assembly, from NVIDIA's PTX: only to compare the model with
times that were measured on an H200.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from typing import Any

REGISTERS = 65536  # of a multiprocessor
SHARED = 227 * 1024
WARPS = 64


def registers(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of its stack: what it spills."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = [int(re.search(rf"{name}:(\d+)", done.stdout)[1]) for name in ("REG", "STACK")]
    return found[0], found[1]


def waves(registers: int, shared: int, warps: int) -> float:
    """Warps of a kernel on each of a multiprocessor's four parts."""
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    groups = min(by_registers, WARPS // warps, SHARED // max(1, shared + 1024), 32)
    return groups * warps / 4


def read(ptx: str) -> tuple[dict, dict | None, str]:
    """Counts of the whole kernel and of its loop with the most products, and the shape of those."""
    lines = [line.strip() for line in ptx.splitlines()]
    lines = lines[next(i for i, line in enumerate(lines) if ".entry" in line) :]
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\$L\w+:", line)}
    spans = []
    for i, line in enumerate(lines):
        found = re.search(r"bra(?:\.uni)?\s+(\$L\w+);", line)
        if found and labels.get(found[1], i) < i:
            spans.append((labels[found[1]], i))
    loops = [count(lines[a : b + 1]) for a, b in spans]
    loop = max(loops, key=lambda each: each["classes"].get("mfma", 0), default=None)
    products = re.search(r"(wgmma\.mma_async\S*?m64n(\d+)k(\d+))|(mma\.sync\S*?m(\d+)n(\d+)k(\d+))", ptx)
    shape = ""
    if products and products[1]:  # a group of four warps multiplies 64 rows: 16 each
        shape = f"16x{products[2]}x{products[3]}"
    elif products:
        shape = f"{products[5]}x{products[6]}x{products[7]}"
    return count(lines), loop, shape


def count(lines: list[str]) -> dict[str, dict[Any, int]]:
    classes: Counter[str] = Counter()
    moved: dict[str, Counter[int]] = {"loads": Counter(), "stores": Counter(), "lds": Counter()}
    for line in lines:
        found = re.match(r"(?:@!?%p\d+ )?([a-z][\w.:]*)", line)
        if not found or not line.endswith(";"):
            continue
        name = found[1]
        if name.startswith(("wgmma.mma", "mma.sync")):
            classes["mfma"] += 1
        elif name.startswith("cp.async.c"):  # commits and waits are no copies
            if "cg.shared" in name or "ca.shared" in name:
                width = int(re.search(r"0x[0-9a-f]+", line.split("]")[-1])[0], 16)
                classes["load"] += 1
                moved["loads"][width] += 1
                moved["lds"][width] += 1
        elif name.startswith(("ld.global", "st.global", "ld.shared", "st.shared", "ldmatrix", "stmatrix")):
            plain, cls = ("loads", "load") if name.startswith("ld") else ("stores", "store")
            kind, cls = ("lds", "lds read") if "shared" in name or "matrix" in name else (plain, cls)
            classes[cls] += 1
            moved[kind][_width(name)] += 1
        elif name.startswith("bar"):
            classes["barrier"] += 1
        elif not name.startswith(("ret", "bra", "cp", "wgmma", "fence", "griddep")):
            classes["valu"] += 1
    return {"classes": dict(classes), **{key: dict(value) for key, value in moved.items()}}


def _width(name: str) -> int:
    matrix = re.search(r"\.x(\d)", name)
    if matrix:
        return 4 * int(matrix[1])
    vector = re.search(r"\.v(\d)", name)
    return (int(vector[1]) if vector else 1) * int(re.search(r"[bfu](\d+)$", name)[1]) // 8
