"""Draw the README's picture of the maths from real factors: `python docs/plot_maths.py`."""

from pathlib import Path

import matplotlib
import torch

from monarch_rocm import MonarchShape, monarch_weight

matplotlib.use("agg")
import matplotlib.pyplot as plt

torch.manual_seed(0)
shape = MonarchShape(27, 27, nblocks=3)
blkdiag1, blkdiag2 = torch.randn(shape.factor1), torch.randn(shape.factor2)
hidden = shape.K * shape.Q
permutation = torch.zeros(hidden, hidden)
for j in range(hidden):  # grouped position l*R + r takes hidden feature r*L + l
    permutation[j % shape.L * shape.R + j // shape.L, j] = 2.5

panels = [
    ("dense weight, 27x27\n(blocked layout)", monarch_weight(blkdiag1, blkdiag2, layout="blocked")),
    ("=  blkdiag2\nL = 3 blocks of S x R = 9x9", torch.block_diag(*blkdiag2)),
    ("x  permutation\nh[r*L + l] to block l", permutation),
    ("x  blkdiag1\nK = 3 blocks of Q x P = 9x9", torch.block_diag(*blkdiag1)),
]
figure, axes = plt.subplots(1, 4, figsize=(13, 4.2), layout="constrained")
for axis, (title, matrix) in zip(axes, panels, strict=True):
    shown = matrix / matrix.abs().max()
    axis.imshow(shown.masked_fill(shown == 0, float("nan")), cmap="RdBu", vmin=-1, vmax=1)
    for edge in (8.5, 17.5):
        axis.axhline(edge, color="0.8", linewidth=0.8)
        axis.axvline(edge, color="0.8", linewidth=0.8)
    axis.set(title=title, xticks=[], yticks=[])
figure.savefig(Path(__file__).with_name("maths.png"), dpi=110)
