"""One small problem for every shipped config of every kernel, with a reference of its own.

Sizes are odd and leave tails in every tile; features are padded; groups and layouts take turns. A case
needs few programs, but its config is the shipped one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support import assert_within_budget, error_over_budget

from cdna.backend import ARCHS, on_cdna
from monarch_rocm.kernels import bdmm, bdmm_wgrad, bdmv, chained, fused, interleave, tuning

DTYPES = {2: (torch.bfloat16, torch.float16), 4: (torch.float32,)}
# How kernels address memory: by buffer instructions, as for tensors below 2 GiB, by plain 64-bit
# addresses, and by those with 64-bit offsets in the kernel.
ADDRESSING = {"buffer": (True, False), "global": (False, False), "wide": (False, True)}
FEW = tuning.FEW


@dataclass(frozen=True)
class Case:
    """A row of a config table and where it is tried."""

    kernel: str
    row: int
    dtype: torch.dtype
    arch: str
    addressing: str

    @property
    def config(self) -> dict[str, int]:
        return self.table[self.row]["config"]

    @property
    def table(self) -> list[dict[str, Any]]:
        return tuning.table(self.kernel, self.arch)[1][str(self.dtype.itemsize)]

    def __str__(self) -> str:
        return f"{self.kernel}-{self.row}-{str(self.dtype)[6:]}-{self.arch}-{self.addressing}"


def every_case() -> list[Case]:
    """All rows of all tables, on all architectures, in all dtypes and ways of addressing."""
    return [
        Case(kernel, row, dtype, arch, addressing)
        for kernel in MAKERS
        for arch in ARCHS
        for itemsize, dtypes in DTYPES.items()
        for row in range(len(tuning.table(kernel, arch)[1][str(itemsize)]))
        for dtype in dtypes
        for addressing in ADDRESSING
    ]


def some_cases() -> list[Case]:
    """Every row once, and every kernel on every architecture; dtypes and ways of addressing take turns."""
    turns = {}
    for case in every_case():
        # Equal rows of several architectures' tables count as one.
        key = case.kernel, case.dtype.itemsize, str(case.table[case.row])
        turns.setdefault(key, []).append(case)
    # 5 has no divisor in common with the ways that the cases of a row differ.
    chosen = [cases[5 * i % len(cases)] for i, cases in enumerate(turns.values())]
    missing = {(case.kernel, case.arch): case for case in every_case()}
    for case in chosen:
        missing.pop((case.kernel, case.arch), None)
    return [*chosen, *missing.values()]


def sizes_of(case: Case) -> tuple[int, int, int]:
    """(out, in, tokens) for which a lookup finds the row: odd and with tails in all tiles where it can."""
    config, rows = case.config, case.table
    candidates = []
    for name, tile in (("out", ("BO", "BR")), ("in", ("BI", "BC")), ("tokens", ("BT",))):
        limits = sorted({row["max"][name] for row in rows if name in row["max"]})
        size = next((config[key] for key in tile if key in config), 16)
        free = max([size, *limits]) + 3 if name != "in" else max([3 * size, *limits]) + 3
        own = case.table[case.row]["max"].get(name)
        preferred = [max(1, own - 1), own] if own else [free]
        if name == "tokens":  # as few as will do
            free = _tokens(case, size)
            preferred = [free, *(limit + 1 for limit in limits), *preferred]
        candidates.append([*preferred, *(limit + 1 for limit in limits), *limits, free])
    for out, depth, tokens in itertools.product(*candidates):
        bucket = tuning.bucket_of(tokens)
        found = tuning._lookup(case.kernel, case.arch, case.dtype.itemsize, out, depth, bucket)
        if found is rows[case.row]:
            return out, depth, tokens
    raise LookupError(f"no shape takes row {case.row} of {case.kernel} on {case.arch}: {rows[case.row]}")


def _tokens(case: Case, tile: int) -> int:
    if case.kernel == "bdmv":
        return FEW - 3
    if case.kernel == "bdmm_wgrad":  # a loop over tokens, in every second row split among programs
        return ((2 if case.row % 2 else 1) * case.config["MIN_STEPS"] + 1) * tile + 5
    return max(FEW, tile) + 5


@dataclass(frozen=True)
class Trial:
    """A call of a launcher, and the same maths for tensors of any dtype."""

    run: Callable[[], torch.Tensor]
    operands: tuple[torch.Tensor, ...]
    maths: Callable[..., torch.Tensor]
    depth: int


def positions(blocks: int, size: int, group: int) -> torch.Tensor:
    """Where feature `size*b + n` lies, by the formula of kernels/README.md."""
    j = torch.arange(blocks * size)
    return (j % group) * (blocks * size // group) + j // group


def features(x: torch.Tensor, blocks: int, size: int, group: int) -> torch.Tensor:
    """`(tokens, blocks, size)` out of `(tokens, positions)`, zeros past the end."""
    padded = torch.nn.functional.pad(x, (0, blocks * size - x.shape[1]))
    return padded[:, positions(blocks, size, group)].unflatten(1, (blocks, size))


def placed(y: torch.Tensor, group: int, kept: int) -> torch.Tensor:
    """The other way round."""
    tokens, blocks, size = y.shape
    out = y.new_empty(tokens, blocks * size)
    out[:, positions(blocks, size, group)] = y.flatten(1)
    return out[:, :kept]


def draw(case: Case, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(case.dtype)


def groups(case: Case, blocks: int, size_in: int, size_out: int) -> tuple[int, int]:
    """The groups that layers need, and in some rows ones that divide a block or only all blocks."""
    return [
        (1, size_out),
        (size_in, 1),
        (1, 1),
        (size_in, size_out),
        (blocks, blocks),
    ][case.row % 5]


def stage(case: Case, out: int, depth: int, tokens: int) -> Trial:
    """A product of blocks; in every second row its input lies tokens first, as hidden features do."""
    blocks = 3
    group_in, group_out = groups(case, blocks, depth, out)
    x = draw(case, tokens, blocks * depth - 1)
    if case.row % 2:
        x = x.t().contiguous().t()
    w, kept = draw(case, blocks, out, depth, scale=depth**-0.5), blocks * out - min(2, out)
    bias = draw(case, kept) if case.row % 3 else None
    launcher = {"bdmm": bdmm.bdmm, "bdmv": bdmv.bdmv}[case.kernel]

    def maths(x, w, bias=None):
        y = torch.einsum("tbi,boi->tbo", features(x, blocks, depth, group_in), w)
        y = placed(y, group_out, kept)
        return y if bias is None else y + bias

    operands = (x, w) if bias is None else (x, w, bias)
    hidden = case.row % 4 == 1
    return Trial(
        lambda: launcher(x, w, bias, kept, group_in, group_out, hidden, case.config), operands, maths, depth
    )


def weight_gradient(case: Case, out: int, depth: int, tokens: int) -> Trial:
    blocks = 2
    group_in, group_out = groups(case, blocks, depth, out)
    g, a = draw(case, tokens, blocks * out - min(1, out - 1)), draw(case, tokens, blocks * depth - 1)
    if case.row % 2:
        g = g.t().contiguous().t()

    def maths(g, a):
        return torch.einsum(
            "tbo,tbi->boi", features(g, blocks, out, group_out), features(a, blocks, depth, group_in)
        )

    return Trial(
        lambda: bdmm_wgrad.bdmm_wgrad(g, a, blocks, out, depth, group_out, group_in, case.config),
        (g, a),
        maths,
        tokens,
    )


def transposed(case: Case, rows: int, columns: int, tokens: int) -> Trial:
    x = draw(case, tokens, rows * columns - 1)
    kept = rows * columns - min(2, rows * columns - 1)
    bias = draw(case, kept) if case.row % 2 else None

    def maths(x, bias=None):
        padded = torch.nn.functional.pad(x, (0, 1))
        y = padded.unflatten(1, (rows, columns)).mT.flatten(1)[:, :kept]
        return y if bias is None else y + bias

    operands = (x,) if bias is None else (x, bias)
    return Trial(lambda: interleave.interleave(x, rows, columns, kept, bias, case.config), operands, maths, 1)


# Blocks in and out, features of a block in and out, rank: with every layout and hidden features or none.
FUSED = [(4, 4, 13, 11, 4), (16, 16, 32, 32, 2), (2, 4, 30, 17, 8), (8, 2, 40, 64, 8)]


def layer(case: Case, k: int, l: int, p: int, s: int, rank: int) -> Trial:
    q, r, tokens = rank * l, rank * k, case.config["BT"] + 5
    interleaved = case.dtype != torch.float16
    x, kept = draw(case, tokens, k * p - 1), l * s - 2
    w1, w2 = draw(case, k, q, p, scale=p**-0.5), draw(case, l, s, r, scale=r**-0.5)
    bias = draw(case, kept)

    def maths(x, w1, w2, bias):
        h = torch.einsum("tkp,kqp->tkq", features(x, k, p, 1), w1)
        # Feature r*L + l belongs to block l of the second factor: group R there.
        z = torch.einsum("tlr,lsr->tls", features(h.flatten(1), l, r, r), w2)
        return torch.cat([placed(z, s if interleaved else 1, kept) + bias, h.flatten(1)], 1)

    def run():
        return torch.cat(fused.fused(x, w1, w2, bias, kept, interleaved, True, case.config), 1)

    return Trial(run, (x, w1, w2, bias), maths, max(p, r))


def whole_layer(case: Case) -> Trial:
    """The first of the layers above for which a lookup finds the row."""
    for k, l, p, s, rank in FUSED:
        widest, size = max(k * p, l * s, k * rank * l), max(p, s, rank * k, rank * l)
        found = tuning._lookup("fused", case.arch, case.dtype.itemsize, widest, size, case.config["BT"] * 2)
        if found is case.table[case.row]:
            return layer(case, k, l, p, s, rank)
    raise LookupError(f"no layer of FUSED takes row {case.row} on {case.arch}")


def both_stages(case: Case) -> Trial:
    """Several tiles of tokens and, in every factor, of features both ways; blocked outputs."""
    k, l, p, s, q = 3, 2, 70, 75, 80
    r, tokens, kept = k * q // l, case.config["BT"] + 5, l * s - 2
    x = draw(case, tokens, k * p - 1)
    w1, w2 = draw(case, k, q, p, scale=p**-0.5), draw(case, l, s, r, scale=r**-0.5)
    bias = draw(case, kept)

    def maths(x, w1, w2, bias):
        h = torch.einsum("tkp,kqp->tkq", features(x, k, p, 1), w1)
        z = torch.einsum("tlr,lsr->tls", features(h.flatten(1), l, r, r), w2)
        return placed(z, 1, kept) + bias

    return Trial(lambda: chained.chained(x, w1, w2, bias, kept, case.config), (x, w1, w2, bias), maths, r)


MAKERS: dict[str, Callable[[Case], Trial]] = {
    "bdmm": lambda case: stage(case, *sizes_of(case)),
    "bdmv": lambda case: stage(case, *sizes_of(case)),
    "bdmm_wgrad": lambda case: weight_gradient(case, *sizes_of(case)),
    "interleave": lambda case: transposed(case, *sizes_of(case)),
    "fused": whole_layer,
    "chained": both_stages,
}


def try_case(case: Case, detailed: bool = False) -> dict[str, Any]:
    """Run a case, raise where it is not right, and return what the census keeps of it."""
    torch.manual_seed(0)
    trial = MAKERS[case.kernel](case)
    buffers, wide = ADDRESSING[case.addressing]
    with on_cdna(case.arch, buffers, detailed, wide) as backend:
        got = trial.run()
    plain = trial.maths(*trial.operands)
    exact = trial.maths(*(operand.double() for operand in trial.operands))
    assert_within_budget(str(case), got, plain, exact, trial.depth)
    (launch,) = backend.launches
    assert not launch.compiled.program.vector_spills, f"{case} spills vector registers"
    # Without the mark too, where the compiler can bound an offset by itself.
    assert not buffers or "buffer" in launch.addressing, f"{case} makes no use of buffers"
    return {
        "error": error_over_budget(got, plain, exact, trial.depth),
        "programs": launch.programs,
        "addressing": "+".join(sorted(launch.addressing)),
        "vector_spills": launch.compiled.program.vector_spills,
        "scalar_spills": launch.compiled.program.scalar_spills,
        "lds": launch.compiled.lds,
        "counters": launch.counters,
    }
