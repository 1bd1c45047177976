"""Layers of other libraries: each format's own dense matrix, written from its definition, equals ours."""

import pytest
import torch
from support import shape_id
from torch import nn

from monarch_rocm import MonarchLinear, MonarchShape, interop

pytestmark = pytest.mark.filterwarnings("ignore:a Monarch layer")


def draw(*size):
    return torch.randn(*size, dtype=torch.float64)


def fly(state):
    """`y[s*L + l] = sum_r w2[l,s,r] h[r*L + l]`, by the position of each hidden feature."""
    w1, w2 = state.values()
    (K, Q, P), (L, S, _) = w1.shape, w2.shape
    dense = draw(L * S, K * P).zero_()
    for k in range(K):
        for q in range(Q):
            r, l = divmod(k * Q + q, L)
            for s in range(S):
                dense[s * L + l, k * P : (k + 1) * P] += w2[l, s, r] * w1[k, q]
    return dense


def butterfly(state):
    """fly's einsum: hidden features (k, j, y) with y of b1 fastest in either factor, outputs (s, j)."""
    w1, w2 = state.values()
    K, J = w1.shape[0], w2.shape[0]
    w1 = w1.reshape(K, J, -1, w1.shape[2])
    w2 = w2.reshape(J, w2.shape[1], K, -1)
    dense = torch.einsum("jsky,kjyp->sjkp", w2, w1)
    return dense.reshape(dense.shape[0] * J, -1)


def block_diagonal(state):
    return torch.block_diag(*state["weight"])


def kronecker(state):
    """The product of two matrices whose support is a Kronecker product, entry by entry."""
    dense = []
    for factor in state.values():
        a, b, c, d = factor.shape
        matrix = draw(a * b * d, a * c * d).zero_()
        for i, j, m, n in torch.cartesian_prod(*map(torch.arange, (a, b, c, d))).view(-1, 4).tolist():
            matrix[(i * b + j) * d + n, (i * c + m) * d + n] = factor[i, j, m, n]
        dense.append(matrix)
    return dense[1] @ dense[0]


def btt(state):
    """`y[l*S + s] = sum_(k,t) W2[l, k*r + t, s] sum_p W1[k, p, l*r + t] x[k*P + p]`."""
    w1, w2 = state.values()
    (K, P, width), (L, _, S) = w1.shape, w2.shape
    r = width // L
    dense = draw(L * S, K * P).zero_()
    for l in range(L):
        for k in range(K):
            for t in range(r):
                block = torch.outer(w2[l, k * r + t], w1[k, :, l * r + t])
                dense[l * S : (l + 1) * S, k * P : (k + 1) * P] += block
    return dense


def gralora(state):
    """peft's forward on the unit vectors: products by block, ranks exchanged between blocks, products."""
    a, b = state.values()
    N, P, r = a.shape
    x = torch.eye(N * P, dtype=torch.float64).view(-1, N, P)
    h = torch.stack([x[:, n] @ a[n] for n in range(N)], 1).view(-1, N, N, r // N)
    h = h.transpose(1, 2).reshape(-1, N, r)
    return torch.cat([h[:, n] @ b[n] for n in range(N)], 1).T


def low_rank_right(state):
    """The kernels' w1: ranks of one output block in a row; outputs as fly has them."""
    w1, w2 = state.values()
    return butterfly({"w1": w1.transpose(1, 2), "w2": w2})


def low_rank_right_left(state):
    w1, w2 = state.values()
    return butterfly({"w1": w1.transpose(1, 2), "w2": w2.transpose(1, 2)})


# The format, arguments of its functions, its dense matrix, and states: square, wide, narrow, rank 1 and
# more, K other than L where the format has it, and no divisor in common.
CASES = [
    ("fly", {}, fly, {"blkdiag1": (4, 3, 3), "blkdiag2": (4, 9, 3)}),
    ("fly", {}, fly, {"blkdiag1": (4, 3, 9), "blkdiag2": (4, 3, 3)}),
    ("fly", {}, fly, {"blkdiag1": (5, 2, 2), "blkdiag2": (5, 2, 2)}),
    ("torch_structured", {}, fly, {"w1": (4, 6, 6), "w2": (4, 3, 6)}),
    ("torch_structured", {}, fly, {"w1": (3, 4, 4), "w2": (3, 7, 4)}),
    ("blockdiag_butterfly", {}, butterfly, {"w1_bfly": (3, 10, 4), "w2_bfly": (5, 6, 6)}),
    ("blockdiag_butterfly", {}, butterfly, {"w1_bfly": (4, 2, 7), "w2_bfly": (2, 5, 4)}),
    ("block_diagonal", {}, block_diagonal, {"weight": (3, 4, 5)}),
    ("block_diagonal", {}, block_diagonal, {"weight": (2, 7, 2)}),
    ("kronecker_sparse", {}, kronecker, {"factors.0": (3, 10, 4, 1), "factors.1": (1, 6, 6, 5)}),
    ("kronecker_sparse", {}, kronecker, {"factors.0": (4, 3, 5, 1), "factors.1": (1, 7, 6, 2)}),
    ("btt", {}, btt, {"op_params.0": (3, 4, 10), "op_params.1": (5, 6, 7)}),
    ("btt", {}, btt, {"op_params.0": (4, 5, 2), "op_params.1": (2, 4, 3)}),
    ("gralora", {}, gralora, {"gralora_A": (3, 4, 6), "gralora_B": (3, 6, 5)}),
    ("gralora", {"adapter": "me"}, gralora, {"gralora_A.me": (2, 7, 2), "gralora_B.me": (2, 2, 3)}),
    ("block_low_rank", {"form": "torch"}, fly, {"w1_bfly": (4, 6, 5), "w2_bfly": (4, 3, 6)}),
    ("block_low_rank", {"form": "right"}, low_rank_right, {"w1_bfly": (3, 5, 6), "w2_bfly": (3, 4, 6)}),
    (
        "block_low_rank",
        {"form": "right_left"},
        low_rank_right_left,
        {"w1_bfly": (3, 4, 6), "w2_bfly": (3, 6, 7)},
    ),
]
BIAS = {"btt": "b", "gralora": None}


def case_id(case):
    if isinstance(case, str):
        return case
    if isinstance(case, dict):
        return "-".join(shape_id(v) if isinstance(v, tuple) else str(v) for v in case.values()) or "plain"
    return getattr(case, "__name__", None)


by_case = pytest.mark.parametrize(("form", "kwargs", "dense", "sizes"), CASES, ids=case_id)


def pair(form):
    return getattr(interop, f"from_{form}"), getattr(interop, f"to_{form}")


def assert_same(one, two):
    assert one.keys() == two.keys()
    for key in one:
        assert one[key].dtype == two[key].dtype
        assert torch.equal(one[key], two[key]), key


@by_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_a_state_is_read_right_and_written_again_bit_for_bit(form, kwargs, dense, sizes, dtype):
    read, write = pair(form)
    state = {f"up.{name}": draw(*size).to(dtype) for name, size in sizes.items()}
    bias = BIAS.get(form, "bias")
    layer = read(state, "up.", **kwargs)
    if bias is not None:
        state[f"up.{bias}"] = draw(layer.out_features).to(dtype)
        layer = read(state | {"elsewhere": draw(1)}, "up.", **kwargs)
        assert torch.equal(layer.bias, state[f"up.{bias}"])
    assert layer.blkdiag1.dtype == dtype
    assert_same(write(layer, "up.", **kwargs), state)
    if dtype == torch.float64:
        exact = dense({name: state[f"up.{name}"] for name in sizes})
        torch.testing.assert_close(layer.weight, exact)
        x = draw(3, exact.shape[1])
        torch.testing.assert_close(layer(x), nn.functional.linear(x, exact, layer.bias))


@by_case
def test_what_is_read_shares_no_memory_and_keeps_the_meta_device(form, kwargs, dense, sizes):
    read, write = pair(form)
    state = {name: draw(*size) for name, size in sizes.items()}
    layer = read(state, **kwargs)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    written = write(layer, **kwargs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert_same(state, kept)
    assert_same(written, kept)
    assert all(tensor.is_contiguous() for tensor in written.values())
    meta = read({name: tensor.to("meta") for name, tensor in state.items()}, **kwargs)
    assert meta.blkdiag1.is_meta
    assert {n: t.shape for n, t in write(meta, **kwargs).items()} == {n: t.shape for n, t in state.items()}


@pytest.mark.parametrize("sizes", [(18, 33), (33, 18), (20, 20), (17, 19)], ids=shape_id)
def test_padded_layers_of_fly_and_torch_structured(sizes):
    """Widths that blocks do not divide: inputs padded with zeros, outputs cut, as both do."""
    for form, rank_of in (("fly", None), ("torch_structured", "inputs")):
        read, write = pair(form)
        layer = MonarchLinear(*sizes, nblocks=4, dtype=torch.float64)
        if rank_of == "inputs":
            P, S = -(-sizes[0] // 4), -(-sizes[1] // 4)
            layer = interop.from_fly(
                {"blkdiag1": draw(4, P, P), "blkdiag2": draw(4, S, P), "bias": draw(sizes[1])},
                in_features=sizes[0],
            )
        state = write(layer)
        again = read(state, in_features=sizes[0])
        assert repr(again) == repr(layer)
        assert_same(again.state_dict(), layer.state_dict())
        bias = state.pop("bias")
        exact = fly(state)[: sizes[1], : sizes[0]]
        x = draw(5, sizes[0])
        torch.testing.assert_close(again(x), nn.functional.linear(x, exact, bias))


@pytest.mark.parametrize("algo", interop.ALGOS)
@pytest.mark.parametrize("bs_last", [False, True])
def test_kronecker_factors_in_every_storage(algo, bs_last):
    """As ksmm makes its storage from (a, b, c, d), by loops."""
    layer = MonarchLinear(12, 30, nblocks=(3, 5), rank=2, dtype=torch.float64)
    plain = interop.to_kronecker_sparse(layer)
    state = interop.to_kronecker_sparse(layer, algo=algo, bs_last=bs_last)
    assert state["bias"].shape == ((30, 1) if bs_last else (30,))
    for name in ("factors.0", "factors.1"):
        a, b, c, d = plain[name].shape
        for i, j, m, n in torch.cartesian_prod(*map(torch.arange, (a, b, c, d))).view(-1, 4).tolist():
            place = {
                "einsum": (i, j, m, n),
                "bmm": (i * d + n, j, m),
                "kernel": ((i * d + n) * c + m, j),
                "dense": ((i * b + j) * d + n, (i * c + m) * d + n),
            }[algo]
            assert state[name][place] == plain[name][i, j, m, n]
        assert state[name].count_nonzero() == plain[name].count_nonzero()
    patterns = [(3, 10, 4, 1), (1, 6, 6, 5)]
    again = interop.from_kronecker_sparse(state, patterns=patterns, algo=algo)
    assert repr(again) == repr(layer)
    assert_same(again.state_dict(), layer.state_dict())


def test_gralora_is_what_peft_adds():
    peft = pytest.importorskip("peft")
    if not hasattr(peft, "GraloraConfig"):
        pytest.skip("this peft has no GraLoRA")
    config = peft.GraloraConfig(
        r=6, alpha=12, gralora_k=3, target_modules=["0"], init_weights=False, gralora_dropout=0.0
    )
    base = nn.Sequential(nn.Linear(12, 15, dtype=torch.float64))
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    module = model.base_model.model[0]
    layer = interop.from_gralora(
        model.state_dict(), "base_model.model.0.", adapter="default", scaling=module.scaling["default"]
    )
    torch.testing.assert_close(layer.weight, module.get_delta_weight("default").to(layer.weight))
    saved = {key: value for key, value in peft.get_peft_model_state_dict(model).items() if "gralora" in key}
    assert torch.equal(interop.from_gralora(saved, "base_model.model.0.", scaling=2.0).weight, layer.weight)
    with pytest.raises(ValueError, match="gralora_A_general"):
        interop.from_gralora(
            {**saved, "base_model.model.0.gralora_A_general.weight": draw(1, 12)}, "base_model.model.0."
        )


def test_whole_checkpoints_of_fly_load_as_they_are():
    model = nn.Sequential(MonarchLinear(18, 33), nn.ReLU(), MonarchLinear(33, 18, bias=False))
    state = {}
    for name in ("0.", "2."):
        state |= interop.to_fly(model[int(name[0])], name)
    other = nn.Sequential(MonarchLinear(18, 33), nn.ReLU(), MonarchLinear(33, 18, bias=False))
    other.load_state_dict(state)
    x = torch.randn(4, 18)
    assert torch.equal(other(x), model(x))


def interleaved(*sizes, **kwargs):
    return MonarchLinear(*sizes, **kwargs)


def blocked(*sizes, **kwargs):
    return MonarchLinear(*sizes, **kwargs, layout="blocked")


@pytest.mark.parametrize(
    ("write", "layer", "said"),
    [
        (interop.to_fly, blocked(16, 16), "takes layout='interleaved'"),
        (interop.to_fly, interleaved(12, 12, nblocks=(2, 3)), "takes K = L blocks"),
        (interop.to_fly, interleaved(16, 16, rank=2), r"Q = min\(P, S\)"),
        (interop.to_torch_structured, interleaved(64, 16), "as many hidden features as inputs"),
        (interop.to_torch_structured, blocked(16, 64), "layout='interleaved'"),
        (interop.to_blockdiag_butterfly, interleaved(24, 25, rank=1), "out_features divisible by 4"),
        (interop.to_blockdiag_butterfly, interleaved(20, 20), "a whole rank"),
        (interop.to_block_diagonal, interleaved(16, 16), "a blkdiag2 of ones"),
        (interop.to_kronecker_sparse, interleaved(23, 24, rank=1), "in_features divisible by 4"),
        (interop.to_kronecker_sparse, blocked(24, 24), "layout='interleaved'"),
        (interop.to_btt, interleaved(16, 16), r"\(4, 4, 4\) and \(4, 4, 4\): it takes layout='blocked'"),
        (interop.to_btt, blocked(20, 20), "a whole rank"),
        (interop.to_gralora, blocked(16, 16), "takes no bias"),
        (interop.to_gralora, blocked(12, 12, bias=False, nblocks=(2, 3)), "K = L blocks"),
        (lambda l: interop.to_block_low_rank(l, form="right"), interleaved(20, 20), "a whole rank"),
        (lambda l: interop.to_block_low_rank(l, form="torch"), interleaved(12, 12, nblocks=(2, 3)), "K = L"),
    ],
)
def test_layers_that_a_format_cannot_hold_are_refused(write, layer, said):
    with pytest.raises(ValueError, match=said) as caught:
        write(layer)
    assert f"{layer.in_features}->{layer.out_features}" in str(caught.value)


ONE, TWO = draw(3, 10, 4), draw(5, 6, 6)
DENSE = {"factors.0": draw(30, 12), "factors.1": draw(30, 30)}
PATTERNS = [(3, 10, 4, 1), (1, 6, 6, 5)]


@pytest.mark.parametrize(
    ("read", "state", "kwargs", "said"),
    [
        ("fly", {}, {}, "has blkdiag1, blkdiag2, bias, but the state has nothing"),
        ("fly", {"w1": ONE}, {}, "but the state has w1"),
        ("fly", {"blkdiag1": ONE, "blkdiag2": TWO, "lora_A": ONE}, {}, "lora_A"),
        ("fly", {"blkdiag1": ONE, "blkdiag2": TWO[:, :, 1:]}, {}, r"writes K\*Q = 30 .* reads L\*R = 25"),
        ("fly", {"blkdiag1": ONE, "blkdiag2": TWO.float()}, {}, "blkdiag2 torch.float32"),
        ("fly", {"blkdiag1": ONE, "blkdiag2": TWO.to("meta")}, {}, "one device"),
        ("fly", {"blkdiag1": ONE[0], "blkdiag2": TWO}, {}, r"blkdiag1 .* must be 3-D, but it is \(10, 4\)"),
        ("fly", {"blkdiag1": ONE.int(), "blkdiag2": TWO}, {}, "torch.int32"),
        ("fly", {"blkdiag1": ONE, "blkdiag2": "x"}, {}, "it is a str"),
        ("fly", {"blkdiag1": ONE, "blkdiag2": TWO}, {"in_features": 7}, "from 10 to 12"),
        ("fly", {"blkdiag1": ONE, "blkdiag2": TWO, "bias": draw(25)}, {}, "from 26 to 30"),
        ("fly", {"blkdiag1": ONE, "blkdiag2": TWO, "bias": draw(29)}, {"out_features": 30}, "30 outputs"),
        ("torch_structured", {"w1": ONE, "w2": TWO}, {}, r"square blocks .* \(3, 10, 4\)"),
        ("blockdiag_butterfly", {"w1_bfly": ONE, "w2_bfly": TWO[:4]}, {}, "4 output blocks do not allow"),
        ("block_diagonal", {"weight": ONE, "bias": draw(29)}, {}, "cuts its 30 outputs to 29"),
        ("block_diagonal", {"weight": ONE, "bias": draw(7)}, {}, "from 28 to 30, not 7"),
        ("kronecker_sparse", DENSE, {"algo": "dense"}, "give patterns"),
        ("kronecker_sparse", DENSE, {"algo": "dense", "patterns": PATTERNS}, "not zero off the support"),
        (
            "kronecker_sparse",
            DENSE,
            {"algo": "kernel", "patterns": PATTERNS},
            r"\(12, 10\) for algo='kernel'",
        ),
        ("kronecker_sparse", DENSE, {"algo": "dense", "patterns": PATTERNS[:1]}, "two patterns"),
        ("kronecker_sparse", DENSE, {"algo": "dense", "patterns": [(1, 2, 2, 3)] * 2}, r"\(K, Q, P, 1\)"),
        ("kronecker_sparse", DENSE, {"algo": "bsr"}, "algo='bsr'"),
        ("btt", {"op_params.0": ONE, "op_params.1": TWO, "op_params.2": draw(1)}, {}, "op_params.2"),
        ("btt", {"op_params.0": ONE, "op_params.1": TWO}, {}, "hidden features of a block"),
        ("gralora", {"gralora_A": ONE, "gralora_B": TWO}, {}, "as many blocks"),
        ("gralora", {"gralora_A.me": ONE, "gralora_B.me": ONE}, {}, "gralora_A.me"),
        ("block_low_rank", {"w1_bfly": ONE, "w2_bfly": ONE}, {"form": "left"}, "form='left'"),
        ("block_low_rank", {"w1_bfly": ONE, "w2_bfly": ONE}, {"form": "right"}, "do not allow"),
    ],
)
def test_states_that_are_no_layer_are_refused(read, state, kwargs, said):
    with pytest.raises(ValueError, match=said):
        getattr(interop, f"from_{read}")(state, **kwargs)


def test_only_layers_are_exported():
    with pytest.raises(TypeError, match="not a Linear"):
        interop.to_fly(nn.Linear(4, 4))


def test_every_format_has_both_ways():
    names = {name for name in vars(interop) if name.startswith(("from_", "to_"))}
    assert {name.partition("_")[2] for name in names} == {case[0] for case in CASES}
    assert len(names) == 2 * len({case[0] for case in CASES})


def test_a_block_diagonal_layer_trains_its_own_weight_alone():
    layer = interop.from_block_diagonal({"weight": draw(3, 4, 5)})
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["blkdiag1"]
    with torch.no_grad():
        layer.blkdiag1.mul_(2)
    assert torch.equal(interop.to_block_diagonal(layer)["weight"], layer.blkdiag1)
    assert layer.shape == MonarchShape.from_factors((3, 4, 5), (12, 1, 1))
