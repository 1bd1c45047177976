"""Draw the pictures of the maths from real factors and the library's own index maps.

    python docs/plot_maths.py

writes `maths.png`, the README's, and the figures of `maths.md`.
"""

from pathlib import Path

import matplotlib
import torch

from monarch_rocm import MonarchShape, monarch_weight

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

HERE = Path(__file__).parent
COLORS = ("#1f77b4", "#d95f02", "#2ca02c")  # of the output blocks
SVG = {"svg.hashsalt": "monarch-rocm", "svg.fonttype": "none", "font.size": 11}


def product():
    """A dense weight is blkdiag2 times a permutation times blkdiag1."""
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
    return figure


def flow():
    """Features on their way: two inputs a block in, dealt over the output blocks, interleaved out."""
    shape = MonarchShape(9, 9, nblocks=3)
    K, L, P, Q, R, S = shape.K, shape.L, shape.P, shape.Q, shape.R, shape.S
    figure, axis = plt.subplots(figsize=(9.5, 5), layout="constrained")
    x, h, g, y = 0.0, 2.0, 4.0, 6.0  # columns: inputs, hidden, hidden as grouped by block, outputs

    def row(index, size):
        return -index - index // size * 0.7

    for k in range(K):
        for p in range(P):
            for q in range(Q):
                axis.plot([x, h], [row(k * P + p, P), row(k * Q + q, Q)], color="0.75", lw=0.8, zorder=1)
    for r in range(R):
        for l in range(L):
            ends = row(r * L + l, Q), row(l * R + r, R)
            axis.plot([h, g], ends, color=COLORS[l], lw=1.6, zorder=1)
    for l in range(L):
        for r in range(R):
            for s in range(S):
                axis.plot([g, y], [row(l * R + r, R), row(l * S + s, S)], color=COLORS[l], lw=0.8, alpha=0.5)
    for column, size, name in ((x, P, "x"), (h, Q, "h"), (g, R, "h"), (y, S, "y")):
        for index in range(9):
            block = index // size
            source = {x: index, h: index, g: index % R * L + block, y: index % S * L + block}[column]
            color = {x: "0.4", h: COLORS[index % L], g: COLORS[block], y: COLORS[block]}[column]
            axis.plot(column, row(index, size), "o", ms=20, color="white", mec=color, mew=1.6, zorder=2)
            label = f"{name}{source}"
            axis.text(column, row(index, size), label, ha="center", va="center", zorder=3, fontsize=9)
    for middle, text in (
        (1, "blkdiag1\nK = 3 blocks"),
        (3, "permutation\nh[r*L + l] to block l"),
        (5, "blkdiag2\nL = 3 blocks"),
    ):
        axis.text(middle, 0.9, text, ha="center", va="bottom")
    axis.set(xlim=(-0.5, 6.5), ylim=(-10, 2.2))
    axis.axis("off")
    return figure


def layouts():
    """Which block computed an output, by its place in memory."""
    L, S = 3, 4
    figure, axes = plt.subplots(2, 1, figsize=(8.5, 2.9), layout="constrained")
    for axis, layout in zip(axes, ("interleaved", "blocked"), strict=True):
        for position in range(L * S):
            s, l = divmod(position, L) if layout == "interleaved" else divmod(position, S)[::-1]
            axis.add_patch(Rectangle((position, 0), 0.94, 1, color=COLORS[l], alpha=0.75))
            axis.text(
                position + 0.47, 0.5, f"z[{l},{s}]", ha="center", va="center", color="white", fontsize=9
            )
            axis.text(position + 0.47, -0.22, f"y{position}", ha="center", va="center", fontsize=9)
        formula = "y[s*L + l] = z[l,s]" if layout == "interleaved" else "y[l*S + s] = z[l,s]"
        axis.set_title(f'layout="{layout}":  {formula}', loc="left", fontsize=11)
        axis.set(xlim=(-0.1, L * S), ylim=(-0.4, 1.02))
        axis.axis("off")
    return figure


def weights():
    """The dense weight in both layouts; a color is an output block, a shade a sub-block of rank 1."""
    torch.manual_seed(1)
    shape = MonarchShape(12, 12, nblocks=3, rank=1)
    blkdiag1, blkdiag2 = (torch.rand(size) * 0.8 + 0.2 for size in (shape.factor1, shape.factor2))
    figure, axes = plt.subplots(1, 2, figsize=(8, 4.2), layout="constrained")
    for axis, layout in zip(axes, ("interleaved", "blocked"), strict=True):
        dense = monarch_weight(blkdiag1, blkdiag2, layout=layout)
        owner = torch.arange(12)
        owner = owner % shape.L if layout == "interleaved" else owner // shape.S
        base = torch.tensor([matplotlib.colors.to_rgb(color) for color in COLORS])[owner][:, None]
        shade = (dense / dense.max()).clamp(0.08)[..., None]
        axis.imshow((1 - shade * (1 - base)).numpy())
        for edge in (shape.P - 0.5, 2 * shape.P - 0.5):
            axis.axvline(edge, color="black", linewidth=1)
            if layout == "blocked":
                axis.axhline(edge, color="black", linewidth=1)
        axis.set(title=layout, xlabel="inputs: K = 3 blocks", ylabel="outputs", xticks=[], yticks=[])
    return figure


def main():
    """Write all of them beside this file."""
    product().savefig(HERE / "maths.png", dpi=110)
    with matplotlib.rc_context(SVG):
        for draw in (flow, layouts, weights):
            draw().savefig(HERE / f"maths_{draw.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
