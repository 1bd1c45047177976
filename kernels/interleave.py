"""Transpose within rows: between the blocked and the interleaved order of a layer's outputs.

A batched product writes block by block. This is the one pass that the interleaved layout then costs;
it moves each number once, in runs at both ends.
"""

import torch
import triton
import triton.language as tl

from monarch_rocm.kernels import tuning
from monarch_rocm.kernels.launch import cdiv, constants, launch


@triton.jit(do_not_specialize=["tokens"])
def interleave_kernel(
    x,
    bias,
    y,
    tokens,
    stride_x_t,
    stride_x_f,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    TILES_R: tl.constexpr = (ROWS + BR - 1) // BR
    TILES_C: tl.constexpr = (COLUMNS + BC - 1) // BC
    pid = tl.program_id(0)
    i_c = pid % TILES_C
    i_r = pid // TILES_C % TILES_R
    i_t = pid // (TILES_C * TILES_R)

    o_t = i_t * BT + tl.arange(0, BT)
    if WIDE:
        o_t = o_t.to(tl.int64)
    m_t = o_t < tokens
    o_r = i_r * BR + tl.arange(0, BR)
    o_c = i_c * BC + tl.arange(0, BC)

    o_x = o_r[:, None] * COLUMNS + o_c[None, :]
    m_x = (o_r < ROWS)[:, None] & (o_c < COLUMNS)[None, :] & (o_x < IN)
    if WIDE:
        o_x = o_x.to(tl.int64)
    p_x = x + o_t[:, None, None] * stride_x_t + o_x[None, :, :] * stride_x_f
    b_x = tl.load(p_x, mask=m_t[:, None, None] & m_x[None, :, :], other=0.0)

    o_y = o_c[:, None] * ROWS + o_r[None, :]
    m_y = (o_c < COLUMNS)[:, None] & (o_r < ROWS)[None, :] & (o_y < OUT)
    b_y = tl.permute(b_x, (0, 2, 1))
    if HAS_BIAS:
        b_bias = tl.load(bias + o_y, mask=m_y, other=0.0).to(tl.float32)
        b_y = (b_y.to(tl.float32) + b_bias[None, :, :]).to(y.dtype.element_ty)
    p_y = y + o_t[:, None, None] * OUT + o_y[None, :, :]
    tl.store(p_y, b_y, mask=m_t[:, None, None] & m_y[None, :, :])


def interleave(
    x: torch.Tensor,
    rows: int,
    columns: int,
    out_features: int,
    bias: torch.Tensor | None,
    config: dict[str, int],
) -> torch.Tensor:
    """Take each row of `x` as a matrix `(rows, columns)` and transpose it.

    Args:
        x (Tensor): `(tokens, features)`, any strides; positions past `features` count as zero.
        rows, columns (int): of the matrix that a row holds.
        out_features (int): features that are kept, at most `rows * columns`.
        bias (Tensor, optional): `(out_features,)`, added to the transposed row.
        config (dict): launch parameters.

    Returns:
        Tensor: `(tokens, out_features)`, contiguous.
    """
    tokens, in_features = x.shape
    y = torch.empty(tokens, out_features, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return y
    tiles = cdiv(rows, config["BR"]) * cdiv(columns, config["BC"])
    compiled_for = constants(
        IN=in_features,
        OUT=out_features,
        ROWS=rows,
        COLUMNS=columns,
        HAS_BIAS=bias is not None,
        WIDE=tuning.is_wide(x, y),
        **config,
    )
    programs = cdiv(tokens, config["BT"]) * tiles
    tensors = (x, y if bias is None else bias, y)
    launch(interleave_kernel, programs, tensors, (tokens,), x.stride(), compiled_for)
    return y
