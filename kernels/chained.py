"""A whole layer in one launch, for many tokens of widths whose factors stay in the cache.

A program takes a tile of tokens through both stages, one after the other. The tile's hidden features
pass through a buffer that the program uses again for its next tile, so that they live in the cache:
device memory sees the inputs and the outputs alone.
"""

import torch
import triton
import triton.language as tl

from monarch_rocm.kernels import tuning
from monarch_rocm.kernels.launch import cdiv, constants, launch


@triton.jit
def chained_kernel(
    x,
    w1,
    w2,
    bias,
    y,
    h,
    tokens,
    stride_x_t,
    stride_x_f,
    stride_1_b,
    stride_1_o,
    stride_1_i,
    stride_2_b,
    stride_2_o,
    stride_2_i,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    K: tl.constexpr,
    Q: tl.constexpr,
    P: tl.constexpr,
    L: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    BT: tl.constexpr,
    BO: tl.constexpr,
    BI: tl.constexpr,
):
    TILES_Q: tl.constexpr = (Q + BO - 1) // BO
    TILES_S: tl.constexpr = (S + BO - 1) // BO
    o_b = tl.arange(0, BT)
    o_o = tl.arange(0, BO)
    o_i = tl.arange(0, BI)
    if WIDE:
        o_o, o_i = o_o.to(tl.int64), o_i.to(tl.int64)
    # Hidden features lie in the buffer with the tile's tokens contiguous.
    p_h = h + tl.program_id(0).to(tl.int64) * (K * Q * BT) + o_b

    for i_t in range(tl.program_id(0), (tokens + BT - 1) // BT, tl.num_programs(0)):
        o_t = i_t * BT + o_b
        m_t = o_t < tokens
        if WIDE:
            o_t = o_t.to(tl.int64)

        for j in tl.range(0, K * TILES_Q, flatten=True):
            i_k = j // TILES_Q
            if WIDE:
                i_k = i_k.to(tl.int64)
            o_q = j % TILES_Q * BO + o_o
            b_h = tl.zeros((BT, BO), dtype=tl.float32)
            for i in range(0, P, BI):
                o_p = i + o_i
                o_x = i_k * P + o_p
                m_p = o_p < P
                p_x = x + o_t[:, None] * stride_x_t + o_x[None, :] * stride_x_f
                b_x = tl.load(p_x, mask=m_t[:, None] & (m_p & (o_x < IN))[None, :], other=0.0)
                p_1 = w1 + i_k * stride_1_b + o_q[None, :] * stride_1_o + o_p[:, None] * stride_1_i
                b_1 = tl.load(p_1, mask=m_p[:, None] & (o_q < Q)[None, :], other=0.0)
                b_h = tl.dot(b_x, b_1, b_h, input_precision="ieee")
            o_h = (i_k * Q + o_q) * BT
            tl.store(p_h[:, None] + o_h[None, :], b_h.to(h.dtype.element_ty), mask=(o_q < Q)[None, :])
        tl.debug_barrier()

        for j in tl.range(0, L * TILES_S, flatten=True):
            i_l = j // TILES_S
            if WIDE:
                i_l = i_l.to(tl.int64)
            o_s = j % TILES_S * BO + o_o
            o_y = i_l * S + o_s
            b_y = tl.zeros((BT, BO), dtype=tl.float32)
            for i in range(0, R, BI):
                o_r = i + o_i
                m_r = o_r < R
                b_h = tl.load(p_h[:, None] + ((o_r * L + i_l) * BT)[None, :], mask=m_r[None, :], other=0.0)
                p_2 = w2 + i_l * stride_2_b + o_s[None, :] * stride_2_o + o_r[:, None] * stride_2_i
                b_2 = tl.load(p_2, mask=m_r[:, None] & (o_s < S)[None, :], other=0.0)
                b_y = tl.dot(b_h, b_2, b_y, input_precision="ieee")
            m_y = (o_s < S) & (o_y < OUT)
            if HAS_BIAS:
                b_y += tl.load(bias + o_y, mask=m_y, other=0.0).to(tl.float32)[None, :]
            p_y = y + o_t[:, None] * OUT + o_y[None, :]
            tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_t[:, None] & m_y[None, :])
        tl.debug_barrier()


def chained(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    config: dict[str, int],
) -> torch.Tensor:
    """Outputs of a layer in blocked order on `x (tokens, in_features)`.

    Args:
        x (Tensor): any strides; bfloat16, float16 or float32.
        w1, w2 (Tensor): `(K, Q, P)` and `(L, S, R)`, any strides, the same dtype.
        bias (Tensor, optional): `(out_features,)`, contiguous.
        out_features (int): features that are kept.
        config (dict): launch parameters.

    Returns:
        Tensor: `(tokens, out_features)`, contiguous.
    """
    tokens = x.shape[0]
    y = torch.empty(tokens, out_features, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return y
    config = dict(config)
    programs = min(cdiv(tokens, config["BT"]), config.pop("PROGRAMS"))
    (blocks, n_hidden, n_in), (out_blocks, n_out, width) = w1.shape, w2.shape
    h = torch.empty(programs * config["BT"] * blocks * n_hidden, dtype=x.dtype, device=x.device)
    compiled_for = constants(
        IN=x.shape[1],
        OUT=out_features,
        K=blocks,
        Q=n_hidden,
        P=n_in,
        L=out_blocks,
        S=n_out,
        R=width,
        HAS_BIAS=bias is not None,
        WIDE=tuning.is_wide(x, w1, w2, y),
        **config,
    )
    tensors = (x, w1, w2, y if bias is None else bias, y, h)
    strides = (*x.stride(), *w1.stride(), *w2.stride())
    launch(chained_kernel, programs, tensors, (tokens,), strides, compiled_for)
    return y
