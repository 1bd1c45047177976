"""Layers of other libraries, read from their state dicts and written as such.

Every pair `from_x` and `to_x` moves numbers and computes none, so that a layer that is written and read
again is the same to the bit. What a format cannot hold is refused. The maps are in docs/interop.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from einops import rearrange
from torch import Tensor, nn

from monarch_rocm.linear import MonarchLinear
from monarch_rocm.shape import MonarchShape

State = Mapping[str, Tensor]
Pattern = Sequence[int]

ALGOS = ("einsum", "bmm", "kernel", "dense")
FORMS = ("torch", "right", "right_left")
GRALORA = "peft's GraLoRA"
BLR = "mem-efficient-blr's MonarchLinear"


def from_fly(
    state: State, prefix: str = "", *, in_features: int | None = None, out_features: int | None = None
) -> MonarchLinear:
    """A layer of HazyResearch/fly's `MonarchLinear`: `blkdiag1 (K, Q, P)`, `blkdiag2 (L, S, R)`, `bias`.

    Models whose layers are all of this kind need no conversion: our layers have the same keys and, by
    default, the same shapes, so that `load_state_dict` takes such a checkpoint as it is.

    Args:
        state (mapping): a state dict, of the layer or of a model that has it.
        prefix (str): what the layer's keys start with, ending in a dot. Default: "".
        in_features, out_features (int, optional): widths, which a padded layer's state does not say.
            Default: `K*P`, and the length of the bias or `L*S`.

    Returns:
        MonarchLinear: with parameters of its own, of the state's dtype and on its device.

    Raises:
        ValueError: keys that are missing or that no such layer has, shapes, dtypes or devices that do
            not fit each other.

    Source: Dao et al., "Monarch", 2022; HazyResearch/fly, src/models/layers/monarch_linear.py.

    Example:
        >>> state = {"up.blkdiag1": torch.randn(4, 5, 5), "up.blkdiag2": torch.randn(4, 9, 5)}
        >>> from_fly(state, "up.", in_features=18)
        MonarchLinear(in_features=18, out_features=36, bias=False, nblocks=4, rank=1.25, layout=interleaved)
    """
    what = "fly's MonarchLinear"
    one, two, bias = _read(state, prefix, what, {"blkdiag1": 3, "blkdiag2": 3}, {"bias": (1,)})
    return _layer(what, one, two, bias, "interleaved", in_features, out_features)


def to_fly(layer: MonarchLinear, prefix: str = "") -> dict[str, Tensor]:
    """The state dict of fly's `MonarchLinear(in_features, out_features, nblocks=K)`; inverse of `from_fly`.

    Raises:
        TypeError: no MonarchLinear. ValueError: a shape or layout that fly does not have.

    Example:
        >>> layer = MonarchLinear(30, 20)
        >>> [(key, tuple(value.shape)) for key, value in to_fly(layer).items()]
        [('blkdiag1', (4, 5, 8)), ('blkdiag2', (4, 5, 5)), ('bias', (20,))]
    """
    shape = _check(layer)
    _demand(
        shape,
        "fly's MonarchLinear",
        {
            "layout='interleaved'": shape.layout == "interleaved",
            "K = L blocks": shape.K == shape.L,
            "Q = min(P, S), which rank=None gives": min(shape.P, shape.S) == shape.Q,
        },
    )
    return _write(prefix, blkdiag1=layer.blkdiag1, blkdiag2=layer.blkdiag2, bias=layer.bias)


def from_torch_structured(
    state: State, prefix: str = "", *, in_features: int | None = None, out_features: int | None = None
) -> MonarchLinear:
    """A layer of torch-structured's `MonarchLinear`: `w1 (K, P, P)`, `w2 (K, S, P)`, `bias`.

    Args, returns, raises: as `from_fly`.

    Source: torch-structured 1.3.0, torch_structured/monarch/monarch_linear.py.

    Example:
        >>> from_torch_structured({"w1": torch.randn(2, 8, 8), "w2": torch.randn(2, 3, 8)}).shape.rank
        4
    """
    what = "torch-structured's MonarchLinear"
    one, two, bias = _read(state, prefix, what, {"w1": 3, "w2": 3}, {"bias": (1,)})
    if one.shape[1] != one.shape[2]:
        raise ValueError(f"{what} has square blocks in w1, (K, P, P), but w1 is {tuple(one.shape)}")
    return _layer(what, one, two, bias, "interleaved", in_features, out_features)


def to_torch_structured(layer: MonarchLinear, prefix: str = "") -> dict[str, Tensor]:
    """The state dict of torch-structured's `MonarchLinear`; the inverse of `from_torch_structured`.

    Raises:
        TypeError: no MonarchLinear. ValueError: hidden features other than inputs, or another layout.

    Example:
        >>> sorted(to_torch_structured(MonarchLinear(16, 32)))
        ['bias', 'w1', 'w2']
    """
    shape = _check(layer)
    _demand(
        shape,
        "torch-structured's MonarchLinear",
        {
            "layout='interleaved'": shape.layout == "interleaved",
            "K = L blocks": shape.K == shape.L,
            "Q = P, as many hidden features as inputs": shape.Q == shape.P,
        },
    )
    return _write(prefix, w1=layer.blkdiag1, w2=layer.blkdiag2, bias=layer.bias)


def from_blockdiag_butterfly(state: State, prefix: str = "") -> MonarchLinear:
    """A layer of fly's `BlockdiagButterflyLinear` with `b2=1`: `w1_bfly (K, L*b1, P)`, `w2_bfly
    (L, S, K*b1)`, `bias`.

    Its hidden features are dealt out in another order than those of fly's op: `b1` of them in a row go to
    one output block. A state does not tell `b2`; where that is not 1, outputs are in another order.

    Args, returns, raises: as `from_fly`; also a ValueError where L does not divide the hidden features.

    Source: HazyResearch/fly, the einsum form of `blockdiag_butterfly_multiply`.

    Example:
        >>> state = {"w1_bfly": torch.randn(3, 10, 4), "w2_bfly": torch.randn(5, 6, 6)}
        >>> from_blockdiag_butterfly(state).shape.rank
        2
    """
    what = "fly's BlockdiagButterflyLinear"
    one, two, bias = _read(state, prefix, what, {"w1_bfly": 3, "w2_bfly": 3}, {"bias": (1,)})
    _divides(what, "w1_bfly", one.shape, 1, two.shape[0])
    one = rearrange(one, "k (l t) p -> k (t l) p", l=two.shape[0])
    return _layer(what, one, two, bias, "interleaved")


def to_blockdiag_butterfly(layer: MonarchLinear, prefix: str = "") -> dict[str, Tensor]:
    """The state dict of fly's `BlockdiagButterflyLinear(nblocks1=K, nblocks2=L, b1=rank, b2=1)`.

    Raises:
        TypeError: no MonarchLinear. ValueError: padding, a rank that is no whole number, or another
            layout.

    Example:
        >>> state = to_blockdiag_butterfly(MonarchLinear(12, 30, nblocks=(3, 5), rank=2))
        >>> state["w1_bfly"].shape, state["w2_bfly"].shape
        (torch.Size([3, 10, 4]), torch.Size([5, 6, 6]))
    """
    shape = _check(layer)
    _demand(shape, "fly's BlockdiagButterflyLinear", _whole(shape, "interleaved"))
    one = rearrange(layer.blkdiag1, "k (t l) p -> k (l t) p", l=shape.L)
    return _write(prefix, w1_bfly=one, w2_bfly=layer.blkdiag2, bias=layer.bias)


def from_block_diagonal(
    state: State, prefix: str = "", *, in_features: int | None = None, out_features: int | None = None
) -> MonarchLinear:
    """A layer of fly's and M2's `BlockdiagLinear(shuffle=False)`: `weight (K, S, P)`, `bias`.

    Its one factor becomes `blkdiag1`. `blkdiag2` has a block of one number, 1, for each output, and is
    frozen. That is exact and costs memory and time for nothing: a way into tools that take Monarch layers,
    not a fast layer. A state does not tell `shuffle`; where that is True, inputs are in another order.

    Args, returns, raises: as `from_fly`.

    Source: HazyResearch/m2, bert/src/mm/blockdiag_linear.py.

    Example:
        >>> layer = from_block_diagonal({"weight": torch.ones(2, 3, 4)})
        >>> torch.equal(layer.weight, torch.block_diag(torch.ones(3, 4), torch.ones(3, 4)))
        True
    """
    what = "BlockdiagLinear"
    weight, bias = _read(state, prefix, what, {"weight": 3}, {"bias": (1,)})
    blocks, n_out, _ = weight.shape
    two = weight.new_ones(blocks * n_out, 1, 1)
    if out_features is None and bias is not None:
        out_features = len(bias)
    if out_features is not None and -(-out_features // blocks) != n_out:
        raise ValueError(
            f"{what} of weight {tuple(weight.shape)} has out_features from {blocks * (n_out - 1) + 1} to "
            f"{blocks * n_out}, not {out_features}"
        )
    if out_features is not None and out_features != blocks * n_out:
        raise ValueError(
            f"{what} cuts its {blocks * n_out} outputs to {out_features}, and one number for each output "
            "leaves nothing to cut; give a weight whose blocks divide out_features"
        )
    layer = _layer(what, weight, two, bias, "interleaved", in_features, out_features)
    layer.blkdiag2.requires_grad_(False)
    return layer


def to_block_diagonal(layer: MonarchLinear, prefix: str = "") -> dict[str, Tensor]:
    """The state dict of `BlockdiagLinear(in_features, out_features, nblocks=K)`.

    Raises:
        TypeError: no MonarchLinear. ValueError: a second factor that is not all ones, one number for each
            output.

    Example:
        >>> layer = from_block_diagonal({"weight": torch.randn(2, 3, 4), "bias": torch.randn(6)})
        >>> to_block_diagonal(layer)["weight"].shape
        torch.Size([2, 3, 4])
    """
    shape = _check(layer)
    ones = shape.factor2 == (shape.K * shape.Q, 1, 1)
    ones = ones and (layer.blkdiag2.is_meta or bool((layer.blkdiag2 == 1).all()))
    _demand(shape, "BlockdiagLinear", {"a blkdiag2 of ones, a block for each output": ones})
    return _write(prefix, weight=layer.blkdiag1, bias=layer.bias)


def from_kronecker_sparse(
    state: State, prefix: str = "", *, patterns: Sequence[Pattern] | None = None, algo: str = "einsum"
) -> MonarchLinear:
    """A layer of ksmm's `KSLinear` with two factors `(K, Q, P, 1)` and `(1, S, R, L)`, in its order from
    right to left: `factors.0`, `factors.1`, `bias`.

    Args:
        state, prefix: as in `from_fly`.
        patterns (two tuples of four ints, optional): `(a, b, c, d)` of either factor, whose support is
            `I_a ⊗ 1_(b×c) ⊗ I_d`. Default: the shapes, which for "einsum" are the patterns.
        algo (str): how the factors are stored: "einsum" (a, b, c, d), "bmm" (a*d, b, c), "kernel"
            (a*d*c, b) or "dense" (a*b*d, a*c*d).

    Returns:
        MonarchLinear: as `from_fly`.

    Raises:
        ValueError: as `from_fly`; patterns that are no Monarch matrix; a "dense" factor with numbers
            off its support.

    Source: Gonon et al., "Fast Kronecker-sparse matrix multiplication", 2024; PascalCarrivain/ksmm.

    Example:
        >>> state = {"factors.0": torch.randn(3, 10, 4, 1), "factors.1": torch.randn(1, 6, 6, 5)}
        >>> from_kronecker_sparse(state).shape.nblocks
        (3, 5)
    """
    what = "ksmm's KSLinear"
    if algo not in ALGOS:
        raise ValueError(f"algo must be one of {ALGOS}, but algo={algo!r} was given")
    ndim = {"einsum": 4, "bmm": 3, "kernel": 2, "dense": 2}[algo]
    names = {"factors.0": ndim, "factors.1": ndim}
    one, two, bias = _read(state, prefix, what, names, {"bias": (1, 2)})
    if patterns is None:
        if algo != "einsum":
            raise ValueError(
                f"algo={algo!r} stores factors by patterns that shapes do not tell: give patterns"
            )
        patterns = [tuple(one.shape), tuple(two.shape)]
    if len(patterns) != 2 or any(len(pattern) != 4 for pattern in patterns):
        raise ValueError(f"a Monarch matrix has two patterns (a, b, c, d), but patterns={patterns!r}")
    (K, _, P, d), (a, S, _, L) = patterns
    if d != 1 or a != 1:
        raise ValueError(
            "a Monarch matrix has patterns (K, Q, P, 1) and (1, S, R, L), from right to left, "
            f"but they are {tuple(patterns[0])} and {tuple(patterns[1])}"
        )
    one, two = (
        _kronecker(name, factor, pattern, algo)
        for name, factor, pattern in zip(names, (one, two), patterns, strict=True)
    )
    if bias is not None and bias.ndim == 2:  # with bs_last
        if bias.shape[1] != 1:
            raise ValueError(f"{what} has a bias (out,) or (out, 1), but it is {tuple(bias.shape)}")
        bias = bias[:, 0]
    return _layer(what, one[..., 0], rearrange(two[0], "s r l -> l s r"), bias, "interleaved", K * P, L * S)


def to_kronecker_sparse(
    layer: MonarchLinear, prefix: str = "", *, algo: str = "einsum", bs_last: bool = False
) -> dict[str, Tensor]:
    """The state dict of ksmm's `KSLinear([(K, Q, P, 1), (1, S, R, L)], algo=algo, bs_last=bs_last)`.

    Raises:
        TypeError: no MonarchLinear. ValueError: padding, another layout, an unknown `algo`.

    Example:
        >>> state = to_kronecker_sparse(MonarchLinear(12, 30, nblocks=(3, 5), rank=2))
        >>> state["factors.0"].shape, state["factors.1"].shape
        (torch.Size([3, 10, 4, 1]), torch.Size([1, 6, 6, 5]))
    """
    shape = _check(layer)
    if algo not in ALGOS:
        raise ValueError(f"algo must be one of {ALGOS}, but algo={algo!r} was given")
    _demand(shape, "ksmm's KSLinear", {"layout='interleaved'": shape.layout == "interleaved"} | _even(shape))
    one, two = layer.blkdiag1.detach()[..., None], rearrange(layer.blkdiag2.detach(), "l s r -> 1 s r l")
    if algo == "bmm":
        one, two = (rearrange(factor, "a b c d -> (a d) b c") for factor in (one, two))
    elif algo == "kernel":
        one, two = (rearrange(factor, "a b c d -> (a d c) b") for factor in (one, two))
    elif algo == "dense":
        one, two = (_kronecker_dense(factor) for factor in (one, two))
    bias = layer.bias
    if bs_last and bias is not None:
        bias = bias[:, None]  # type: ignore[assignment]
    return _write(prefix, **{"factors.0": one, "factors.1": two, "bias": bias})


def from_btt(state: State, prefix: str = "") -> MonarchLinear:
    """A block tensor-train layer of compute-better-spent: `op_params.0 (K, P, L*r)`, `op_params.1
    (L, K*r, S)`, `b`.

    Args, returns, raises: as `from_fly`; also a ValueError where L does not divide the hidden features,
    and for a normalised layer, which has gains as `op_params.2` and `.3`.

    Source: Qiu et al., "Compute Better Spent: Replacing Dense Layers with Structured Matrices", 2024,
    section 3.

    Example:
        >>> layer = from_btt({"op_params.0": torch.randn(3, 4, 10), "op_params.1": torch.randn(5, 6, 7)})
        >>> layer.shape.rank, layer.shape.layout
        (2, 'blocked')
    """
    what = "a BTT layer"
    one, two, bias = _read(state, prefix, what, {"op_params.0": 3, "op_params.1": 3}, {"b": (1,)})
    return _from_block_major(what, "op_params.0", one, two, bias)


def to_btt(layer: MonarchLinear, prefix: str = "") -> dict[str, Tensor]:
    """The state dict of a BTT layer of sizes `m = (P, K)`, `n = (L, S)`, of the layer's rank.

    Raises:
        TypeError: no MonarchLinear. ValueError: padding, a rank that is no whole number, or another
            layout.

    Example:
        >>> layer = MonarchLinear(12, 35, nblocks=(3, 5), rank=2, layout="blocked")
        >>> [tuple(value.shape) for value in to_btt(layer).values()]
        [(3, 4, 10), (5, 6, 7), (35,)]
    """
    shape = _check(layer)
    _demand(shape, "a BTT layer", _whole(shape, "blocked"))
    one, two = _to_block_major(layer)
    return _write(prefix, **{"op_params.0": one, "op_params.1": two, "b": layer.bias})


def from_gralora(
    state: State, prefix: str = "", *, adapter: str | None = None, scaling: float = 1.0
) -> MonarchLinear:
    """What a GraLoRA adapter of peft's adds: `gralora_A (N, P, r)`, `gralora_B (N, r, S)`.

    Args:
        state, prefix: as in `from_fly`. Keys of the layer that is adapted are passed over.
        adapter (str, optional): its name, which ends the keys of a model's state dict. Files that peft
            saves have no such ending. Default: none.
        scaling (float): what peft multiplies by, `alpha / r`. Default: 1. Where it is a power of two, this
            rounds nothing.

    Returns:
        MonarchLinear: without bias, in the blocked layout; as `from_fly` else.

    Raises:
        ValueError: as `from_fly`; an adapter that has a plain LoRA beside (`hybrid_r`).

    Source: Jung et al., "GraLoRA: Granular Low-Rank Adaptation", 2025; huggingface/peft.

    Example:
        >>> state = {"q.gralora_A": torch.randn(2, 6, 4), "q.gralora_B": torch.randn(2, 4, 8)}
        >>> from_gralora(state, "q.", scaling=2.0)
        MonarchLinear(in_features=12, out_features=16, bias=False, nblocks=2, rank=2, layout=blocked)
    """
    ending = "" if adapter is None else f".{adapter}"
    names = [f"gralora_A{ending}", f"gralora_B{ending}"]
    ours = {
        key: value
        for key, value in state.items()
        if key.startswith(prefix) and "gralora_" in key[len(prefix) :]
    }
    if adapter is not None:
        ours = {key: value for key, value in ours.items() if adapter in key.split(".")}
    one, two = _read(ours, prefix, GRALORA, dict.fromkeys(names, 3), {})
    if one.shape[0] != two.shape[0]:
        raise ValueError(
            f"{GRALORA} has as many blocks in A as in B, but {tuple(one.shape)}, {tuple(two.shape)}"
        )
    return _from_block_major(GRALORA, names[0], one, two * scaling if scaling != 1 else two, None)


def to_gralora(layer: MonarchLinear, prefix: str = "", *, adapter: str | None = None) -> dict[str, Tensor]:
    """The state of a GraLoRA adapter with `gralora_k=K`, `r = K*rank` and `alpha = r`, which scales by 1.

    Raises:
        TypeError: no MonarchLinear. ValueError: K other than L, padding, a rank that is no whole number,
            another layout, a bias.

    Example:
        >>> layer = MonarchLinear(12, 16, bias=False, nblocks=2, rank=2, layout="blocked")
        >>> [tuple(value.shape) for value in to_gralora(layer).values()]
        [(2, 6, 4), (2, 4, 8)]
    """
    shape = _check(layer)
    fits = {"K = L blocks": shape.K == shape.L, "no bias": layer.bias is None}
    _demand(shape, GRALORA, _whole(shape, "blocked") | fits)
    one, two = _to_block_major(layer)
    ending = "" if adapter is None else f".{adapter}"
    return _write(prefix, **{f"gralora_A{ending}": one, f"gralora_B{ending}": two})


def from_block_low_rank(state: State, prefix: str = "", *, form: str) -> MonarchLinear:
    """A layer of mem-efficient-blr's `MonarchLinear`: `w1_bfly`, `w2_bfly`, `bias`.

    Args:
        state, prefix: as in `from_fly`.
        form (str): how the function that the layer was made for wants its factors, which shapes alone do
            not tell: "torch" `(b, R, P)` and `(b, S, R)`; "right" (functions `triton_monarch_right...`)
            `(b, P, R)` and `(b, S, R)`; "right_left" `(b, P, R)` and `(b, R, S)`.

    Returns, raises: as `from_fly`; also a ValueError for an unknown form.

    Source: pabillam/mem-efficient-blr, layer.py.

    Example:
        >>> state = {"w1_bfly": torch.randn(2, 6, 4), "w2_bfly": torch.randn(2, 4, 8)}
        >>> from_block_low_rank(state, form="right_left").shape.rank
        2
    """
    if form not in FORMS:
        raise ValueError(f"form must be one of {FORMS}, but form={form!r} was given")
    one, two, bias = _read(state, prefix, BLR, {"w1_bfly": 3, "w2_bfly": 3}, {"bias": (1,)})
    if one.shape[0] != two.shape[0]:
        raise ValueError(
            f"{BLR} has as many blocks in w1 as in w2, but {tuple(one.shape)}, {tuple(two.shape)}"
        )
    if form != "torch":
        _divides(BLR, "w1_bfly", one.shape, 2, one.shape[0])
        one = rearrange(one, "k p (l t) -> k (t l) p", l=one.shape[0])
    if form == "right_left":
        two = two.mT
    return _layer(BLR, one, two, bias, "interleaved")


def to_block_low_rank(layer: MonarchLinear, prefix: str = "", *, form: str) -> dict[str, Tensor]:
    """The state dict of mem-efficient-blr's `MonarchLinear` in one of its forms (`from_block_low_rank`).

    Raises:
        TypeError: no MonarchLinear. ValueError: K other than L, padding, another layout, for the forms of
            its kernels a rank that is no whole number, an unknown form.

    Example:
        >>> state = to_block_low_rank(MonarchLinear(12, 16, nblocks=2, rank=2), form="right_left")
        >>> [tuple(value.shape) for value in state.values()]
        [(2, 6, 4), (2, 4, 8), (16,)]
    """
    shape = _check(layer)
    if form not in FORMS:
        raise ValueError(f"form must be one of {FORMS}, but form={form!r} was given")
    fits = {"layout='interleaved'": shape.layout == "interleaved"} | _even(shape)
    fits = (fits if form == "torch" else _whole(shape, "interleaved")) | {"K = L blocks": shape.K == shape.L}
    _demand(shape, BLR, fits)
    one, two = layer.blkdiag1.detach(), layer.blkdiag2.detach()
    if form != "torch":
        one = rearrange(one, "k (t l) p -> k p (l t)", l=shape.L)
    return _write(prefix, w1_bfly=one, w2_bfly=two.mT if form == "right_left" else two, bias=layer.bias)


def _read(
    state: State, prefix: str, what: str, names: Mapping[str, int], optional: Mapping[str, tuple[int, ...]]
) -> list[Tensor]:
    """The tensors of a layer in order of their names, with None for an optional one that is missing."""
    found = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
    missing = [name for name in names if name not in found]
    strange = [name for name in found if name not in names and name not in optional]
    if missing or strange:
        where = f" under {prefix!r}" if prefix else ""
        raise ValueError(
            f"{what} has {', '.join([*names, *optional])}, but the state has "
            f"{', '.join(sorted(found)[:8]) or 'nothing'}{', ...' if len(found) > 8 else ''}{where}"
        )
    ndims = {name: (ndim,) for name, ndim in names.items()} | dict(optional)
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{prefix}{name} must be a torch.Tensor, but it is a {type(tensor).__name__}")
        if tensor.ndim not in ndims[name]:
            raise ValueError(
                f"{prefix}{name} of {what} must be {ndims[name][0]}-D, but it is {tuple(tensor.shape)}"
            )
        if not tensor.numel():
            raise ValueError(f"{prefix}{name} of {what} is empty: {tuple(tensor.shape)}")
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"{prefix}{name} must be floating or complex, but it is {tensor.dtype}")
    for kind in ("dtype", "device"):
        kinds = {name: getattr(tensor, kind) for name, tensor in found.items()}
        if len(set(kinds.values())) > 1:
            listed = ", ".join(f"{name} {value}" for name, value in kinds.items())
            raise ValueError(f"the tensors of a layer must have one {kind}, but they have: {listed}")
    return [found.get(name) for name in ndims]  # type: ignore[misc]


def _layer(
    what: str,
    blkdiag1: Tensor,
    blkdiag2: Tensor,
    bias: Tensor | None,
    layout: str,
    in_features: int | None = None,
    out_features: int | None = None,
) -> MonarchLinear:
    if bias is not None:
        if out_features not in (None, len(bias)):
            raise ValueError(f"{what} has {out_features} outputs, but its bias is {tuple(bias.shape)}")
        out_features = len(bias)
    try:
        sizes = blkdiag1.shape, blkdiag2.shape, in_features, out_features
        shape = MonarchShape.from_factors(*sizes, layout=layout)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    one, two = (nn.Parameter(_own(factor)) for factor in (blkdiag1, blkdiag2))
    bias = None if bias is None else nn.Parameter(_own(bias))
    return MonarchLinear._assemble(shape, one, two, bias, "auto", recompute=False)


def _write(prefix: str, **tensors: Tensor | None) -> dict[str, Tensor]:
    return {prefix + name: _own(tensor) for name, tensor in tensors.items() if tensor is not None}


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _check(layer: MonarchLinear) -> MonarchShape:
    if not isinstance(layer, MonarchLinear):
        raise TypeError(f"a MonarchLinear is exported, not a {type(layer).__name__}")
    return layer.shape


def _demand(shape: MonarchShape, what: str, fits: Mapping[str, bool]) -> None:
    lacking = [condition for condition, holds in fits.items() if not holds]
    if lacking:
        raise ValueError(
            f"{what} cannot hold a layer {shape} with factors {shape.factor1} and {shape.factor2}: "
            f"it takes {' and '.join(lacking)}"
        )


def _even(shape: MonarchShape) -> dict[str, bool]:
    """Conditions of formats that do not pad."""
    return {
        f"in_features divisible by {shape.K}": shape.in_features == shape.K * shape.P,
        f"out_features divisible by {shape.L}": shape.out_features == shape.L * shape.S,
    }


def _whole(shape: MonarchShape, layout: str) -> dict[str, bool]:
    """Conditions of formats that store the hidden features of each pair of blocks together."""
    fits = {f"layout={layout!r}": shape.layout == layout, "a whole rank": shape.Q % shape.L == 0}
    return fits | _even(shape)


def _divides(what: str, name: str, size: Sequence[int], along: int, blocks: int) -> None:
    if size[along] % blocks:
        raise ValueError(
            f"{what} deals the {size[along]} hidden features of a block of {name} {tuple(size)} out evenly, "
            f"which {blocks} output blocks do not allow"
        )


def _from_block_major(what: str, name: str, one: Tensor, two: Tensor, bias: Tensor | None) -> MonarchLinear:
    _divides(what, name, one.shape, 2, two.shape[0])
    one = rearrange(one, "k p (l t) -> k (t l) p", l=two.shape[0])
    return _layer(
        what, one, two.mT, bias, "blocked", *(one.shape[0] * one.shape[2], two.shape[0] * two.shape[2])
    )


def _to_block_major(layer: MonarchLinear) -> tuple[Tensor, Tensor]:
    return rearrange(layer.blkdiag1, "k (t l) p -> k p (l t)", l=layer.shape.L), layer.blkdiag2.mT


def _kronecker(name: str, factor: Tensor, pattern: Pattern, algo: str) -> Tensor:
    """A factor as `(a, b, c, d)`."""
    a, b, c, d = pattern
    sizes = {"einsum": (a, b, c, d), "bmm": (a * d, b, c), "kernel": (a * d * c, b)}
    size = sizes.get(algo, (a * b * d, a * c * d))
    if tuple(factor.shape) != size:
        raise ValueError(
            f"{name} of pattern {tuple(pattern)} is {size} for algo={algo!r}, but it is {tuple(factor.shape)}"
        )
    if algo == "bmm":
        return rearrange(factor, "(a d) b c -> a b c d", a=a)
    if algo == "kernel":
        return rearrange(factor, "(a d c) b -> a b c d", a=a, d=d)
    if algo == "dense":
        whole = rearrange(factor, "(a b d) (e c f) -> a b d e c f", a=a, d=d, e=a, f=d)
        found = whole.diagonal(dim1=0, dim2=3).diagonal(dim1=1, dim2=3)  # b c a d
        found = rearrange(found, "b c a d -> a b c d")
        if not factor.is_meta and not torch.equal(_kronecker_dense(found), factor):
            raise ValueError(f"{name} is not zero off the support of its pattern {tuple(pattern)}")
        return found
    return factor


def _kronecker_dense(factor: Tensor) -> Tensor:
    a, b, c, d = factor.shape
    dense = factor.new_zeros(a, b, d, a, c, d)
    dense.diagonal(dim1=0, dim2=3).diagonal(dim1=1, dim2=3).copy_(rearrange(factor, "a b c d -> b c a d"))
    return rearrange(dense, "a b d e c f -> (a b d) (e c f)")
