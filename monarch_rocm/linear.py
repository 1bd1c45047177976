"""`MonarchLinear`, the module that stands where `nn.Linear` stood."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from monarch_rocm import functional, init, projection
from monarch_rocm.dispatch import check_backend
from monarch_rocm.shape import MonarchShape

if TYPE_CHECKING:
    from typing_extensions import Self


class MonarchLinear(nn.Module):
    """A linear layer whose weight is a Monarch matrix: two block-diagonal factors and a permutation.

    Args:
        in_features (int): width of the input.
        out_features (int): width of the output.
        bias (bool): learn an additive bias. Default: True.
        device, dtype: of every parameter, as for `nn.Linear`.
        nblocks (int or (int, int)): K = L, or (K, L). Default: 4.
        rank (int, optional): rank of each of the K*L sub-blocks of the dense weight. Default: fly's
            sizes (`MonarchShape`).
        layout (str): order of the outputs, "interleaved" (default, as published) or "blocked".
        backend (str): "auto" (default), "triton", "torch" or "reference".
        recompute (bool): save memory in training, `monarch_linear`. Default: False.

    Attributes:
        blkdiag1 (Parameter): `(K, Q, P)`.
        blkdiag2 (Parameter): `(L, S, R)`.
        bias (Parameter or None): `(out_features,)`.
        shape (MonarchShape): the geometry.
        weight (Tensor): `(out_features, in_features)`, dense, computed at each access, differentiable.

    Shape:
        input `(..., in_features)`, output `(..., out_features)`.

    Raises:
        TypeError, ValueError: as `MonarchShape`; an unknown `backend`.

    Source: Dao et al., "Monarch: Expressive Structured Matrices for Efficient and Accurate
    Training", 2022.

    Example:
        >>> layer = MonarchLinear(768, 3072, nblocks=4)
        >>> layer(torch.randn(2, 10, 768)).shape
        torch.Size([2, 10, 3072])
        >>> sum(p.numel() for p in layer.parameters()), 768 * 3072 + 3072
        (740352, 2362368)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        nblocks: int | Sequence[int] = 4,
        rank: int | None = None,
        layout: str = "interleaved",
        backend: str = "auto",
        recompute: bool = False,
    ) -> None:
        super().__init__()
        kwargs = {"device": device, "dtype": dtype}
        self.shape = MonarchShape(in_features, out_features, nblocks, rank, layout)
        self.backend = check_backend(backend)
        self.recompute = recompute
        self.blkdiag1 = nn.Parameter(torch.empty(self.shape.factor1, **kwargs))
        self.blkdiag2 = nn.Parameter(torch.empty(self.shape.factor2, **kwargs))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, **kwargs))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return self.shape.in_features

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return self.shape.out_features

    @property
    def weight(self) -> Tensor:
        """The dense weight `(out_features, in_features)`, computed from the factors, differentiable."""
        dense = projection.monarch_weight(self.blkdiag1, self.blkdiag2, layout=self.shape.layout)
        return dense[: self.out_features, : self.in_features]

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module registers a Parameter before it looks at a property, so that the property's
        # refusal alone would not hold.
        if name == "weight":
            raise AttributeError(
                "MonarchLinear.weight is computed from blkdiag1 and blkdiag2 and cannot be set; "
                "MonarchLinear.from_linear or monarch_rocm.project turn a dense weight into factors"
            )
        super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        """Draw the parameters anew; outputs vary as those of a new `nn.Linear`."""
        init.uniform_(self.blkdiag1, self.blkdiag2, self.bias, self.shape)

    def forward(self, input: Tensor) -> Tensor:
        """`input (..., in_features)` to `(..., out_features)`."""
        parameters = self.blkdiag1, self.blkdiag2, self.bias
        return functional.apply(input, *parameters, self.shape, self.backend, self.recompute)

    def extra_repr(self) -> str:
        shape = self.shape
        nblocks = shape.K if shape.K == shape.L else shape.nblocks
        return (
            f"in_features={shape.in_features}, out_features={shape.out_features}, "
            f"bias={self.bias is not None}, nblocks={nblocks}, rank={shape.rank:.4g}, "
            f"layout={shape.layout}"
        )

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        nblocks: int | Sequence[int] = 4,
        rank: int | None = None,
        layout: str = "interleaved",
        backend: str = "auto",
        recompute: bool = False,
    ) -> Self:
        """The Monarch layer nearest to a dense one (`project`); its dtype, device and mode are kept.

        Args:
            linear (nn.Linear): left as it is. On the meta device, the result is there too.
            nblocks, rank, layout, backend, recompute: as in the constructor.

        Raises:
            TypeError: something else than an `nn.Linear`.
            ValueError: a weight that is not finite.

        Example:
            >>> MonarchLinear.from_linear(nn.Linear(64, 64), nblocks=4, rank=2).shape.rank
            2
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"from_linear takes an nn.Linear, not a {type(linear).__name__}")
        weight = linear.weight
        shape = MonarchShape(linear.in_features, linear.out_features, nblocks, rank, layout)
        if weight.is_meta:
            factors = weight.new_empty(shape.factor1), weight.new_empty(shape.factor2)
        else:
            factors = projection.project_to(weight, shape)
        one, two = (nn.Parameter(factor, weight.requires_grad) for factor in factors)
        bias = linear.bias
        if bias is not None:
            bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
        layer = cls._assemble(shape, one, two, bias, check_backend(backend), recompute)
        return layer.train(linear.training)

    @classmethod
    def _assemble(
        cls,
        shape: MonarchShape,
        blkdiag1: nn.Parameter,
        blkdiag2: nn.Parameter,
        bias: nn.Parameter | None,
        backend: str,
        recompute: bool,
    ) -> Self:
        """A layer of parts that exist already."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.shape, layer.backend, layer.recompute = shape, backend, recompute
        layer.blkdiag1, layer.blkdiag2 = blkdiag1, blkdiag2
        layer.register_parameter("bias", bias)
        return layer

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """The dense layer with the same function, and with parameters of its own.

        Example:
            >>> layer = MonarchLinear(8, 8, nblocks=2)
            >>> x = torch.randn(3, 8)
            >>> torch.allclose(layer.to_linear()(x), layer(x), atol=1e-6)
            True
        """
        linear = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, "meta", self.blkdiag1.dtype
        )
        trains = self.blkdiag1.requires_grad or self.blkdiag2.requires_grad
        linear.weight = nn.Parameter(self.weight.contiguous(), trains)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().clone(), self.bias.requires_grad)
        return linear.train(self.training)
