"""The geometry of a Monarch matrix: how two block-diagonal factors make one layer."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LAYOUTS = ("interleaved", "blocked")


@dataclass(frozen=True, init=False)
class MonarchShape:
    """Sizes of a Monarch matrix `(out_features, in_features)` and of its two factors.

    `blkdiag1` is `(K, Q, P)`: K blocks that read P inputs each and write Q hidden features each.
    `blkdiag2` is `(L, S, R)`: L blocks that read R hidden features each and write S outputs each.
    Always `K*Q == L*R`; `P = ceil(in_features / K)` and `S = ceil(out_features / L)`.

    Args:
        in_features (int): width of the input, at least 1.
        out_features (int): width of the output, at least 1.
        nblocks (int or (int, int)): K = L, or (K, L). Default: 4.
        rank (int, optional): rank of each of the K*L sub-blocks of the dense weight, so that
            `Q = rank*L` and `R = rank*K`. Default: the sizes that HazyResearch/fly uses, for K = L
            `Q = min(P, S)`, else `rank = max(1, min(K*P, L*S) // (K*L))`.
        layout (str): order of the outputs, "interleaved" (`y[s*L + l]`, as published) or "blocked"
            (`y[l*S + s]`).

    Raises:
        TypeError: a size that is no int.
        ValueError: a size below 1, a pair of the wrong length, an unknown layout.

    Warns:
        UserWarning: where the dense weight gets structural zeros (Q < L), and where the factors
            hold more numbers than the dense weight.

    Source: Dao et al., "Monarch: Expressive Structured Matrices for Efficient and Accurate
    Training", 2022, section 3.

    Example:
        >>> shape = MonarchShape(768, 3072, nblocks=4)
        >>> shape.factor1, shape.factor2, shape.num_parameters
        ((4, 192, 192), (4, 768, 192), 737280)
        >>> MonarchShape(768, 3072, nblocks=(4, 8), rank=16).factor1
        (4, 128, 192)
    """

    in_features: int
    out_features: int
    K: int
    L: int
    P: int
    Q: int
    R: int
    S: int
    layout: str

    def __init__(
        self,
        in_features: int,
        out_features: int,
        nblocks: int | Sequence[int] = 4,
        rank: int | None = None,
        layout: str = "interleaved",
    ) -> None:
        in_features = check_size("in_features", in_features)
        out_features = check_size("out_features", out_features)
        K, L = check_nblocks(nblocks)
        P, S = -(-in_features // K), -(-out_features // L)
        if rank is not None:
            Q = check_size("rank", rank) * L
        elif K == L:
            Q = min(P, S)
        else:
            Q = max(1, min(K * P, L * S) // (K * L)) * L
        self._set(
            in_features=in_features,
            out_features=out_features,
            K=K,
            L=L,
            P=P,
            Q=Q,
            R=K * Q // L,
            S=S,
            layout=check_layout(layout),
        )
        self._warn()

    @classmethod
    def from_factors(
        cls,
        factor1: Sequence[int],
        factor2: Sequence[int],
        in_features: int | None = None,
        out_features: int | None = None,
        layout: str = "interleaved",
    ) -> MonarchShape:
        """The geometry of two given factor shapes `(K, Q, P)` and `(L, S, R)`.

        Args:
            factor1, factor2 (tuple of int): shapes of `blkdiag1` and `blkdiag2`.
            in_features, out_features (int, optional): widths before padding. Default: `K*P`, `L*S`.
            layout (str): as in the constructor.

        Raises:
            ValueError: factors that do not fit each other, or features that do not fit them.

        Example:
            >>> MonarchShape.from_factors((4, 6, 5), (3, 7, 8), out_features=20).R
            8
        """
        if len(factor1) != 3 or len(factor2) != 3:
            raise ValueError(
                "blkdiag1 must be (K, Q, P) and blkdiag2 (L, S, R), "
                f"but they are {tuple(factor1)} and {tuple(factor2)}"
            )
        K, Q, P = factor1
        L, S, R = factor2
        if min(K, Q, P, L, S, R) < 1:
            raise ValueError(f"a factor is empty: {tuple(factor1)} and {tuple(factor2)}")
        if K * Q != L * R:
            raise ValueError(
                f"the factors do not meet: blkdiag1 {tuple(factor1)} writes K*Q = {K * Q} hidden "
                f"features, blkdiag2 {tuple(factor2)} reads L*R = {L * R}"
            )
        in_features = K * P if in_features is None else check_size("in_features", in_features)
        out_features = L * S if out_features is None else check_size("out_features", out_features)
        _check_padding("in_features", in_features, K, P)
        _check_padding("out_features", out_features, L, S)
        shape = object.__new__(cls)
        shape._set(
            in_features=in_features,
            out_features=out_features,
            K=K,
            L=L,
            P=P,
            Q=Q,
            R=R,
            S=S,
            layout=check_layout(layout),
        )
        return shape

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def nblocks(self) -> tuple[int, int]:
        """(K, L)."""
        return self.K, self.L

    @property
    def rank(self) -> float:
        """Q/L: the rank of each sub-block of the dense weight, an average where L does not divide Q."""
        return self.Q // self.L if self.Q % self.L == 0 else self.Q / self.L

    @property
    def factor1(self) -> tuple[int, int, int]:
        """Shape of `blkdiag1`, `(K, Q, P)`."""
        return self.K, self.Q, self.P

    @property
    def factor2(self) -> tuple[int, int, int]:
        """Shape of `blkdiag2`, `(L, S, R)`."""
        return self.L, self.S, self.R

    @property
    def reorders(self) -> bool:
        """Whether outputs leave in another order than the second factor's blocks write them in: not with
        one output block, nor with one output a block, where both layouts are one.
        """
        return self.layout == "interleaved" and self.L > 1 and self.S > 1

    @property
    def num_parameters(self) -> int:
        """Numbers in the two factors, without the bias. A forward pass costs twice as many FLOPs a token."""
        return self.K * self.Q * self.P + self.L * self.S * self.R

    def __str__(self) -> str:
        blocks = f"{self.K}" if self.K == self.L else f"{self.K}x{self.L}"
        return (
            f"{self.in_features}->{self.out_features}, {blocks} blocks, rank {self.rank:.4g}, {self.layout}"
        )

    def _warn(self) -> None:
        # stacklevel 1 keeps the warning registry here, so that one model's hundred equal layers
        # warn once and not from a hundred places.
        if self.Q < self.L:
            warnings.warn(
                f"a Monarch layer {self} has structural zeros: its blocks write Q = {self.Q} hidden "
                f"features for L = {self.L} output blocks, so that {1 - self.Q / self.L:.0%} of the dense "
                "weight cannot be anything but zero; fewer blocks or rank=1 avoid that",
                stacklevel=1,
            )
        dense = self.in_features * self.out_features
        if self.num_parameters > dense:
            warnings.warn(
                f"a Monarch layer {self} holds {self.num_parameters:,} numbers, more than the "
                f"{dense:,} of the dense weight; a lower rank or more blocks avoid that",
                stacklevel=1,
            )


def check_size(name: str, value: object) -> int:
    """`value` as an int; raises unless it is one of at least 1."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, but {name}={value!r} was given")
    size = operator.index(value)  # type: ignore[arg-type]
    if size < 1:
        raise ValueError(f"{name} must be at least 1, but {name}={value!r} was given")
    return size


def check_nblocks(nblocks: object) -> tuple[int, int]:
    """(K, L) of an int or a pair; raises otherwise."""
    pair = tuple(nblocks) if isinstance(nblocks, (tuple, list)) else (nblocks, nblocks)
    if len(pair) != 2:
        raise ValueError(f"nblocks must be an int or a pair (K, L), but nblocks={nblocks!r} was given")
    return check_size("nblocks", pair[0]), check_size("nblocks", pair[1])


def check_layout(layout: object) -> str:
    """Raise unless `layout` is a known one."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, but layout={layout!r} was given")
    return layout  # type: ignore[return-value]


def _check_padding(name: str, features: int, blocks: int, size: int) -> None:
    if -(-features // blocks) != size:
        first = blocks * (size - 1) + 1
        raise ValueError(
            f"{name}={features} does not fit {blocks} blocks of {size}: these take "
            f"{name} from {first} to {blocks * size}"
        )
