"""One stage for a handful of tokens, as when a model generates: every weight is read once.

Such a call is bound by the weights' bytes and by latency, so a program takes few output rows and has
as much of them in flight as fits.
"""

import torch
import triton
import triton.language as tl

from monarch_rocm.kernels.bdmm import launch_stage, locate


@triton.jit(do_not_specialize=["tokens"])
def bdmv_kernel(
    x,
    w,
    bias,
    y,
    tokens,
    stride_x_t,
    stride_x_f,
    stride_w_b,
    stride_w_o,
    stride_w_i,
    stride_y_t,
    stride_y_f,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCKS: tl.constexpr,
    N_IN: tl.constexpr,
    N_OUT: tl.constexpr,
    GROUP_IN: tl.constexpr,
    GROUP_OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    BT: tl.constexpr,
    BO: tl.constexpr,
    BI: tl.constexpr,
):
    TILES: tl.constexpr = (N_OUT + BO - 1) // BO
    i_o = tl.program_id(0) % TILES
    i_b = tl.program_id(0) // TILES
    o_t = tl.arange(0, BT)
    m_t = o_t < tokens
    o_o = i_o * BO + tl.arange(0, BO)
    o_row, o_y = locate(i_b, o_o, BLOCKS, N_OUT, GROUP_OUT)
    m_o = o_o < N_OUT
    if WIDE:
        o_t, o_row, o_y = o_t.to(tl.int64), o_row.to(tl.int64), o_y.to(tl.int64)
    w += i_b.to(tl.int64) * stride_w_b

    b_y = tl.zeros((BO, BT), dtype=tl.float32)
    for i in range(0, N_IN, BI):
        o_i = i + tl.arange(0, BI)
        o_col, o_x = locate(i_b, o_i, BLOCKS, N_IN, GROUP_IN)
        m_i = o_i < N_IN
        if WIDE:
            o_col, o_x = o_col.to(tl.int64), o_x.to(tl.int64)
        p_w = w + o_row[:, None] * stride_w_o + o_col[None, :] * stride_w_i
        b_w = tl.load(p_w, mask=m_o[:, None] & m_i[None, :], other=0.0)
        p_x = x + o_x[:, None] * stride_x_f + o_t[None, :] * stride_x_t
        b_x = tl.load(p_x, mask=(m_i & (o_x < IN))[:, None] & m_t[None, :], other=0.0)
        if BT >= 16:
            b_y = tl.dot(b_w, b_x, b_y, input_precision="ieee")
        else:
            b_x = tl.permute(b_x.to(tl.float32), (1, 0))
            b_y += tl.sum(b_w.to(tl.float32)[:, None, :] * b_x[None, :, :], 2)

    m_o = m_o & (o_y < OUT)
    if HAS_BIAS:
        b_y += tl.load(bias + o_y, mask=m_o, other=0.0).to(tl.float32)[:, None]
    p_y = y + o_y[:, None] * stride_y_f + o_t[None, :] * stride_y_t
    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_o[:, None] & m_t[None, :])


def bdmv(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    group_in: int,
    group_out: int,
    hidden: bool,
    config: dict[str, int],
) -> torch.Tensor:
    """What `bdmm` computes, for at most `config["BT"]` tokens; arguments and result are the same."""
    return launch_stage(bdmv_kernel, 1, x, w, bias, out_features, group_in, group_out, hidden, config)
