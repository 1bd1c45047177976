"""`MonarchConfig`: what `monarchize` makes of a model's linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from monarch_rocm.dispatch import check_backend
from monarch_rocm.shape import check_layout, check_nblocks, check_size

INITS = ("project", "random")


@dataclass(frozen=True)
class MonarchConfig:
    """How linear layers are replaced.

    Args:
        nblocks (int or (int, int)): K = L, or (K, L). Default: 4.
        rank (int, optional): rank of each sub-block. Default: fly's sizes (`MonarchShape`).
        layout (str): "interleaved" (default) or "blocked".
        backend (str): "auto" (default), "triton", "torch" or "reference".
        init (str): "project" (default) takes the factors nearest to the dense weight, "random" new
            ones, to train from scratch.
        recompute (bool): save memory in training, as in `MonarchLinear`. Default: False.

    Raises:
        TypeError, ValueError: a field that no layer could take, so that a model is never half
            converted.

    Example:
        >>> config = MonarchConfig(nblocks=(4, 8), rank=16)
        >>> MonarchConfig.from_dict(config.to_dict()) == config
        True
    """

    nblocks: int | tuple[int, int] = 4
    rank: int | None = None
    layout: str = "interleaved"
    backend: str = "auto"
    init: str = "project"
    recompute: bool = False

    def __post_init__(self) -> None:
        # Plain ints and tuples, whatever kind of number was given; JSON gives a pair back as a list.
        pair = check_nblocks(self.nblocks)
        single = not isinstance(self.nblocks, (tuple, list))
        object.__setattr__(self, "nblocks", pair[0] if single else pair)
        if self.rank is not None:
            object.__setattr__(self, "rank", check_size("rank", self.rank))
        check_layout(self.layout)
        check_backend(self.backend)
        if self.init not in INITS:
            raise ValueError(f"init must be one of {INITS}, but init={self.init!r} was given")
        if not isinstance(self.recompute, bool):
            raise TypeError(f"recompute must be True or False, but recompute={self.recompute!r} was given")

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dict that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MonarchConfig:
        """The inverse of `to_dict`, also after a trip through JSON.

        Raises:
            TypeError: no mapping. ValueError: a key that is no field. Both: as in the constructor.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"a MonarchConfig comes from a mapping, not from {values!r}")
        known = [field.name for field in fields(cls)]
        unknown = [key for key in values if key not in known]
        if unknown:
            raise ValueError(f"MonarchConfig has no {unknown}; it has {known}")
        return cls(**values)
