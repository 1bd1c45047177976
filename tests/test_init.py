"""A new Monarch layer starts with the output variance of a new `nn.Linear`."""

import pytest
import torch
from torch import nn

from monarch_rocm import MonarchLinear


@pytest.mark.parametrize(
    ("sizes", "nblocks", "rank"),
    [
        ((1024, 1024), 4, None),
        ((1024, 1024), 32, None),
        ((512, 2048), 4, None),
        ((2048, 512), 4, None),
        ((768, 768), 64, None),
        ((1000, 520), 7, None),
        ((100, 75), 8, None),
        ((1024, 1024), 4, 2),
        ((1024, 512), 1, 16),
        ((512, 512), (4, 16), 3),
    ],
)
@pytest.mark.parametrize("layout", ["interleaved", "blocked"])
@pytest.mark.filterwarnings("ignore:a Monarch layer")
def test_output_variance_is_that_of_nn_linear(sizes, nblocks, rank, layout):
    draws = -(-40_000 // sizes[1])
    x = torch.randn(64, sizes[0])
    ours = torch.cat(
        [MonarchLinear(*sizes, nblocks=nblocks, rank=rank, layout=layout)(x) for _ in range(draws)], 1
    )
    dense = torch.cat([nn.Linear(*sizes)(x) for _ in range(draws)], 1)
    assert 0.9 < float(ours.var() / dense.var()) < 1.1


def test_more_blocks_than_features_keep_the_variance_on_average():
    x = torch.randn(256, 5)
    with pytest.warns(UserWarning, match="structural zeros"):
        ours = torch.stack([MonarchLinear(5, 7, bias=False, nblocks=8)(x) for _ in range(4000)])
    dense = torch.stack([nn.Linear(5, 7, bias=False)(x) for _ in range(4000)])
    assert 0.9 < float(ours.var() / dense.var()) < 1.1


def test_bias_is_drawn_as_in_nn_linear():
    bias = MonarchLinear(16, 50_000).bias
    assert bias.abs().max() <= 0.25
    assert abs(float(bias.var()) * 3 * 16 - 1) < 0.05
