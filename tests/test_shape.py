"""MonarchShape: the sizes that everything else is built on, and what it refuses."""

import json

import pytest
import torch

from monarch_rocm import MonarchConfig, MonarchShape


@pytest.mark.parametrize(
    ("sizes", "factor1", "factor2"),
    [
        ((512, 2048, 4), (4, 128, 128), (4, 512, 128)),  # in < out: (nb, ib, ib), (nb, ob, ib)
        ((2048, 512, 4), (4, 128, 512), (4, 128, 128)),  # in >= out: (nb, ob, ib), (nb, ob, ob)
        ((10, 33, 4), (4, 3, 3), (4, 9, 3)),
        ((5, 7, 8), (8, 1, 1), (8, 1, 1)),
        ((768, 768, 64), (64, 12, 12), (64, 12, 12)),
    ],
)
@pytest.mark.filterwarnings("ignore:a Monarch layer")
def test_default_rank_gives_the_shapes_of_fly(sizes, factor1, factor2):
    shape = MonarchShape(*sizes)
    assert (shape.factor1, shape.factor2) == (factor1, factor2)


def test_rank_sets_the_hidden_width():
    shape = MonarchShape(96, 60, (4, 6), 3)
    assert (shape.K, shape.L, shape.P, shape.Q, shape.R, shape.S) == (4, 6, 24, 18, 12, 10)
    assert shape.rank == 3
    assert shape.num_parameters == 3 * 6 * 96 + 3 * 4 * 60  # rho*L*in + rho*K*out


def test_unequal_blocks_take_the_largest_rank_within_dense():
    shape = MonarchShape(30, 50, (3, 5))
    assert shape.rank == min(30, 50) // 15


def test_odd_quotient_is_an_average_rank():
    assert MonarchShape(30, 30, 4).rank == 2
    with pytest.warns(UserWarning, match="structural zeros"):
        assert MonarchShape(12, 12, 8).rank == 0.25


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"in_features": 0}, ValueError, "in_features=0"),
        ({"out_features": -1}, ValueError, "out_features=-1"),
        ({"in_features": 2.0}, TypeError, "in_features=2.0"),
        ({"nblocks": 0}, ValueError, "nblocks=0"),
        ({"nblocks": (2, 2, 2)}, ValueError, r"pair \(K, L\)"),
        ({"nblocks": "4"}, TypeError, "nblocks='4'"),
        ({"nblocks": True}, TypeError, "nblocks=True"),
        ({"rank": 0}, ValueError, "rank=0"),
        ({"rank": 1.5}, TypeError, "rank=1.5"),
        ({"layout": "block"}, ValueError, "interleaved"),
    ],
)
def test_bad_sizes_are_refused_with_what_was_given(arguments, error, said):
    with pytest.raises(error, match=said):
        MonarchShape(**({"in_features": 8, "out_features": 8} | arguments))


def test_sizes_become_plain_ints():
    import numpy as np

    odd = MonarchShape(np.int64(8), torch.tensor(8), np.int32(2), np.int64(1))
    assert odd == MonarchShape(8, 8, 2, 1)
    assert hash(odd) == hash(MonarchShape(8, 8, 2, 1))
    assert {type(value) for value in (odd.in_features, odd.out_features, odd.K, odd.Q)} == {int}
    config = MonarchConfig(nblocks=(np.int64(2), 4), rank=np.int64(3))
    assert json.loads(json.dumps(config.to_dict()))["nblocks"] == [2, 4]


def test_structural_zeros_warn_with_the_share():
    with pytest.warns(UserWarning, match=r"Q = 12 .* L = 64 .* 81%"):
        MonarchShape(768, 768, 64)


def test_more_than_dense_warns_with_the_numbers():
    with pytest.warns(UserWarning, match="32,768 numbers, more than the 16,384"):
        MonarchShape(128, 128, 4, 32)


def test_equal_layers_warn_once(recwarn):
    import warnings

    warnings.resetwarnings()
    for _ in range(3):
        MonarchShape(767, 767, 64)
    assert len(recwarn) == 1


def test_from_factors_knows_its_factors():
    shape = MonarchShape(33, 10, (4, 3), 2)
    assert MonarchShape.from_factors(shape.factor1, shape.factor2, 33, 10) == shape
    assert hash(MonarchShape.from_factors(shape.factor1, shape.factor2, 33, 10)) == hash(shape)


@pytest.mark.parametrize(
    ("factor1", "factor2", "features", "said"),
    [
        ((4, 6, 5), (3, 7, 9), {}, r"K\*Q = 24 .* L\*R = 27"),
        ((4, 6), (3, 7, 8), {}, r"\(4, 6\)"),
        ((4, 6, 5), (3, 7, 8), {"in_features": 21}, None),
        ((4, 6, 5), (3, 7, 8), {"in_features": 16}, "from 17 to 20"),
        ((4, 6, 5), (3, 7, 8), {"out_features": 22}, "from 19 to 21"),
        ((4, 0, 5), (3, 7, 0), {}, "empty"),
    ],
)
def test_factors_that_do_not_fit_are_refused(factor1, factor2, features, said):
    with pytest.raises(ValueError, match=said):
        MonarchShape.from_factors(factor1, factor2, **features)


def test_reorders_where_the_layouts_differ():
    assert MonarchShape(16, 24, (4, 3), rank=2).reorders
    assert not MonarchShape(16, 24, (4, 3), rank=2, layout="blocked").reorders
    assert not MonarchShape(16, 24, (4, 1), rank=2).reorders
    assert not MonarchShape(16, 4, (4, 4), rank=1).reorders
