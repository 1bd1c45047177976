"""Block-diagonal matrix product whose features are read and written through index maps.

One kernel serves both stages of a Monarch layer and both input gradients (`README.md`).
"""

from typing import Any

import torch
import triton
import triton.language as tl

from monarch_rocm.hidden import new_hidden
from monarch_rocm.kernels import tuning
from monarch_rocm.kernels.launch import Constants, cdiv, constants, launch
from monarch_rocm.kernels.order import tile_of_program


@triton.jit
def locate(b, o_n, BLOCKS: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr):
    """Row in the factor and position in memory of the features `o_n` of block `b`.

    Where GROUP divides N, `o_n` counts in memory order, so that neighbours lie in runs of
    N // GROUP; elsewhere it counts in the factor's order.
    """
    if GROUP == 1:
        return o_n, b * N + o_n
    elif GROUP == N:
        return o_n, o_n * BLOCKS + b
    elif N % GROUP == 0:
        RUN: tl.constexpr = N // GROUP
        o_g = o_n // RUN
        o_r = o_n % RUN
        return o_r * GROUP + o_g, (o_g * BLOCKS + b) * RUN + o_r
    else:
        o_f = b * N + o_n
        return o_n, (o_f % GROUP) * (BLOCKS * N // GROUP) + o_f // GROUP


@triton.jit
def bdmm_kernel(
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
    XCDS: tl.constexpr,
    BT: tl.constexpr,
    BO: tl.constexpr,
    BI: tl.constexpr,
):
    # Programs that share rows of x are neighbours, so that those rows are read from cache.
    TILES: tl.constexpr = (N_OUT + BO - 1) // BO
    if XCDS > 1 and TILES > 1:
        i_t, i_n = tile_of_program(TILES * BLOCKS, XCDS)
        i_o = i_n % TILES
        i_b = i_n // TILES
    else:
        pid = tl.program_id(0)
        i_o = pid % TILES
        i_b = pid // TILES % BLOCKS
        i_t = pid // (TILES * BLOCKS)

    o_t = i_t * BT + tl.arange(0, BT)
    m_t = o_t < tokens
    if WIDE:
        o_t = o_t.to(tl.int64)
    o_o = i_o * BO + tl.arange(0, BO)
    o_row, o_y = locate(i_b, o_o, BLOCKS, N_OUT, GROUP_OUT)
    m_o = o_o < N_OUT
    if WIDE:
        o_row, o_y = o_row.to(tl.int64), o_y.to(tl.int64)
    w += i_b.to(tl.int64) * stride_w_b

    b_y = tl.zeros((BT, BO), dtype=tl.float32)
    for i in range(0, N_IN, BI):
        o_i = i + tl.arange(0, BI)
        o_col, o_x = locate(i_b, o_i, BLOCKS, N_IN, GROUP_IN)
        m_i = o_i < N_IN
        if WIDE:
            o_col, o_x = o_col.to(tl.int64), o_x.to(tl.int64)
        p_x = x + o_t[:, None] * stride_x_t + o_x[None, :] * stride_x_f
        b_x = tl.load(p_x, mask=m_t[:, None] & (m_i & (o_x < IN))[None, :], other=0.0)
        p_w = w + o_col[:, None] * stride_w_i + o_row[None, :] * stride_w_o
        b_w = tl.load(p_w, mask=m_i[:, None] & m_o[None, :], other=0.0)
        b_y = tl.dot(b_x, b_w, b_y, input_precision="ieee")

    m_o = m_o & (o_y < OUT)
    if HAS_BIAS:
        b_y += tl.load(bias + o_y, mask=m_o, other=0.0).to(tl.float32)[None, :]
    p_y = y + o_t[:, None] * stride_y_t + o_y[None, :] * stride_y_f
    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_t[:, None] & m_o[None, :])


def bdmm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    group_in: int,
    group_out: int,
    hidden: bool,
    config: dict[str, int],
) -> torch.Tensor:
    """Multiply `x (tokens, features)` by `blocks` matrices `w (blocks, n_out, n_in)`.

    Args:
        x (Tensor): any strides; bfloat16, float16 or float32.
        w (Tensor): any strides, the same dtype.
        bias (Tensor, optional): `(out_features,)`, contiguous, added before rounding.
        out_features (int): features that are kept, at most `blocks * n_out`.
        group_in, group_out (int): the index maps' groups.
        hidden (bool): the output is hidden features, which lie as `new_hidden` says.
        config (dict): launch parameters.

    Returns:
        Tensor: `(tokens, out_features)`, contiguous unless `hidden`.
    """
    tiles = cdiv(x.shape[0], config["BT"])
    return launch_stage(bdmm_kernel, tiles, x, w, bias, out_features, group_in, group_out, hidden, config)


def launch_stage(
    kernel: Any,
    tiles: int,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    group_in: int,
    group_out: int,
    hidden: bool,
    config: dict[str, int],
) -> torch.Tensor:
    """Run a kernel with the parameters of `bdmm_kernel` on `tiles` tiles of tokens."""
    tokens = x.shape[0]
    if hidden:
        y = new_hidden(x, (tokens,), out_features)
    else:
        y = torch.empty(tokens, out_features, dtype=x.dtype, device=x.device)
    if tokens:
        programs = tiles * w.shape[0] * cdiv(w.shape[1], config["BO"])
        arguments = stage_arguments(x, w, bias, y, group_in, group_out, config)
        launch(kernel, programs, *arguments)
    return y


def stage_arguments(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    group_in: int,
    group_out: int,
    config: dict[str, int],
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...], tuple[int, ...], Constants]:
    """What `launch` wants after kernel and programs, for the parameters of `bdmm_kernel`."""
    blocks, n_out, n_in = w.shape
    compiled_for = constants(
        IN=x.shape[1],
        OUT=y.shape[1],
        BLOCKS=blocks,
        N_IN=n_in,
        N_OUT=n_out,
        GROUP_IN=group_in,
        GROUP_OUT=group_out,
        HAS_BIAS=bias is not None,
        WIDE=tuning.is_wide(x, w, y),
        XCDS=tuning.chiplets(x.device),
        **config,
    )
    tensors = (x, w, y if bias is None else bias, y)
    return tensors, (x.shape[0],), (*strides_of(x), *w.stride(), *y.stride()), compiled_for


def strides_of(x: torch.Tensor) -> tuple[int, ...]:
    """Strides of `x (tokens, features)`, of which a single token's is not what the caller's happened to be:
    launches are remembered by strides.
    """
    return x.stride() if x.shape[0] > 1 else (x.shape[1], x.stride(1))
