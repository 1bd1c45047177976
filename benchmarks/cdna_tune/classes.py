"""Rows of a table that are searched: which block sizes and tokens each serves, and by what it is tried.

Every class has a shape that stands for it, and for each kernel the launches of layers that run blocks of
that shape: those by which candidates are ranked hold every orientation of every operand, and the others,
with odd sizes, odd tokens and 64-bit offsets too, must compile without spills.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from monarch_rocm.codegen.layers import Layer
from monarch_rocm.kernels import space

Place = tuple[Layer, str]
FEATURES = 4096  # of the layers that a time is modelled for
TOKENS = 8192
NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Class:
    """One search: blocks up to `out` and `in` (None: any), of which `(n_out, n_in)` stand for all."""

    kernel: str
    dtype: str
    out: int | None
    inner: int | None
    n_out: int
    n_in: int
    buckets: tuple[int | None, ...]  # of tokens, None for any number

    def limits(self, bucket: int | None) -> dict[str, int]:
        """As a row of a table names them."""
        limits = {"out": self.out, "in": self.inner, "tokens": bucket}
        return {name: limit for name, limit in limits.items() if limit is not None}

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "fp32" else 2


# (limit of out, limit of in, what stands for them), in the order of rows: the first that holds serves.
STAGES = (
    (16, 16, 16, 16), (16, None, 16, 64), (32, 32, 32, 32), (32, None, 32, 128), (64, 32, 64, 32),
    (64, None, 64, 64), (None, 32, 128, 32), (None, None, 512, 512),
)  # fmt: skip
GRADIENTS = (
    (16, 16, 16, 16), (16, None, 16, 64), (32, 32, 32, 32), (32, None, 32, 64), (64, 32, 64, 32),
    (64, None, 64, 64), (None, 32, 128, 32), (None, None, 512, 512),
)  # fmt: skip
SIDES = (4, 8, 16, 32, None)


def classes() -> Iterator[Class]:
    """All, in the order of rows."""
    for dtype in ("bf16", "fp32"):
        for each in STAGES:
            yield Class("bdmm", dtype, *each, (64, 1024, None))
        for each in GRADIENTS:
            yield Class("bdmm_wgrad", dtype, *each, (1024, None))
        for rows in SIDES:
            for columns in SIDES:
                stand = (rows or (64 if columns is None else 128), columns or (64 if rows is None else 128))
                yield Class("interleave", dtype, rows, columns, *stand, (None,))
        for tokens in (1, 2, 4, None):
            for inner, n in ((64, 64), (256, 256), (None, 1024)):
                yield Class("bdmv", dtype, None, inner, n, n, (tokens,))


def candidates(each: Class) -> list[dict[str, int]]:
    """Configs of the search space that suit a class.

    Left out, for a search of minutes: tiles that are much smaller or larger than the blocks; many waves on
    small tiles; more than half a wave's registers full of results; large tiles of float32, and of `bdmv`
    all but 4 waves there; for few tokens one stage and one wave, and for `bdmv` other numbers of stages
    than here.
    """
    return [config for config in space.candidates(each.kernel, rocm=True) if _suits(each, config)]


def _suits(each: Class, config: dict[str, int]) -> bool:
    tiles = {"out": config.get("BO", config.get("BR")), "in": config.get("BI", config.get("BC"))}
    warps = config["num_warps"]
    if each.kernel == "interleave":
        numbers = config["BT"] * tiles["out"] * tiles["in"]
        if each.dtype == "fp32" and numbers > 2048:
            return False
        inside = all(
            tile == limit if limit else tile >= 32
            for tile, limit in ((tiles["out"], each.out), (tiles["in"], each.inner))
        )
        return inside and (1024 <= numbers <= 4096 or (config["BT"] == 16 and numbers < 1024))
    if each.kernel == "bdmv":
        tokens = each.buckets[0] or 16
        numbers = config["BT"] * tiles["out"] * tiles["in"]
        return (
            config["BT"] == tokens
            and each.n_in // (4 if tokens == 16 else 2) <= tiles["in"] <= each.n_in
            and (tokens == 16 or 128 * warps <= numbers <= 2**13)
            and 4 <= tiles["out"] <= 32
            and config["num_stages"] == (2 if tokens == 16 else 1)
            and (each.dtype != "fp32" or warps == 4)
        )
    largest = 128 if each.dtype == "fp32" else 256
    if each.kernel == "bdmm":
        numbers = config["BT"] * tiles["out"]
        inner = tiles["in"] == each.inner if each.inner else 32 <= tiles["in"] <= each.n_in
        outer = tiles["out"] == each.out if each.out else tiles["out"] >= 64
        one_step = tiles["in"] >= each.n_in and config["num_stages"] > 1
    else:
        numbers = tiles["in"] * tiles["out"]
        inner = tiles["in"] == each.inner if each.inner else tiles["in"] >= 64
        outer = tiles["out"] == each.out if each.out else tiles["out"] >= 64
        one_step = config["BT"] < 32 or (config["BT"] == 128 and max(tiles.values()) < 64)
    if each.dtype == "fp32" and (tiles["in"] > 64 or config["BT"] > 64 or warps == 8):
        return False
    if each.kernel == "bdmm" and config["BT"] < 64 and (config["num_stages"], warps) not in ((2, 2), (2, 4)):
        return False
    a_wave = numbers / warps
    return (
        inner
        and outer
        and not one_step
        and max(tiles["out"], config["BT"]) <= largest
        and 64 <= a_wave <= 128 * 64
    )


def ranked_by(each: Class) -> tuple[Place, ...]:
    """The launches whose modelled time ranks candidates: the first of them all, the others those that
    are left then. It is the one that has the most to transpose.
    """
    a, b = each.n_out, each.n_in
    if each.kernel == "bdmm":
        return (_layer(each, a, b), "backward 5"), (_layer(each, b, a), "forward 1")
    if each.kernel == "bdmm_wgrad":
        return (_layer(each, a, b), "backward 2"), (_layer(each, b, a), "backward 4")
    if each.kernel == "bdmv":
        return ((_generating(each), "forward 2"),)
    return ((Layer(a * b, a * b, a, TOKENS, each.dtype, path="triton", rank=1), "forward 3"),)


def _generating(each: Class) -> Layer:
    return Layer(4 * each.n_in, 4 * each.n_in, 4, each.buckets[0] or 16, each.dtype)


def _layer(each: Class, size: int, width: int) -> Layer:
    """First blocks of (width, size), second ones of (size, width)."""
    return Layer(16 * size, 16 * size, 16, TOKENS, each.dtype, train=True, rank=max(1, width // 16))


def must_compile(each: Class) -> tuple[tuple[Place, bool], ...]:
    """All launches, and whether as for huge tensors, that must not spill."""
    a, b = each.n_out, each.n_in
    found = [(place, False) for place in ranked_by(each)]
    if each.kernel == "bdmm":
        found += [((_layer(each, a, b), "forward 2"), False), ((_layer(each, b, a), "backward 3"), False)]
        (_, second), (transposed, _) = _odd(each, a, b), _odd(each, b, a)
        # The latter is of one output block, whose gradients go through no pass before the products.
        found += [((second, "forward 2"), True), ((transposed, "backward 4"), True)]
    elif each.kernel == "bdmm_wgrad":
        found.append(((_odd(each, a, b)[1], "backward 2"), True))
    elif each.kernel == "bdmv" and each.dtype == "bf16":
        found += [((_generating(each), place), True) for place in ("forward 1", "forward 2")]
    return tuple(found)


def _odd(each: Class, a: int, b: int) -> tuple[Layer, Layer]:
    """Layers with odd blocks and tokens, whose first, or second, factor has blocks of (a - 1, b - 1)."""
    first = Layer(3 * (b - 1) - 1, 3 * a - 5, (3, 1), TOKENS + 3, each.dtype, train=True, rank=a - 1)
    second = Layer(3 * b - 5, 3 * (a - 1) - 1, (1, 3), TOKENS + 3, each.dtype, train=True, rank=b - 1)
    return first, second
