"""A whole layer in one launch, for widths whose hidden features fit in a program's registers.

All blocks of a stage are one batched product, so that both permutations happen inside the program and
neither the hidden features nor a copy of the outputs passes through memory.
"""

import torch
import triton
import triton.language as tl

from monarch_rocm.hidden import new_hidden
from monarch_rocm.kernels import tuning
from monarch_rocm.kernels.launch import cdiv, constants, launch


@triton.jit(do_not_specialize=["tokens"])
def fused_kernel(
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
    stride_h_t,
    stride_h_f,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEP: tl.constexpr,
    WIDE: tl.constexpr,
    BP: tl.constexpr,
    BS: tl.constexpr,
    BT: tl.constexpr,
):
    Q: tl.constexpr = RANK * L
    R: tl.constexpr = RANK * K
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    if WIDE:
        o_t = o_t.to(tl.int64)
    m_t = (o_t < tokens)[None, :, None]
    o_k = tl.arange(0, K)[:, None, None]
    o_l = tl.arange(0, L)[:, None, None]

    o_p = tl.arange(0, BP)
    o_q = tl.arange(0, Q)[None, None, :]
    o_s = tl.arange(0, BS)
    if WIDE:
        o_k, o_l, o_p, o_q, o_s = (
            o_k.to(tl.int64),
            o_l.to(tl.int64),
            o_p.to(tl.int64),
            o_q.to(tl.int64),
            o_s.to(tl.int64),
        )
    o_x = o_k * P + o_p[None, None, :]
    m_x = m_t & (o_p < P)[None, None, :] & (o_x < IN)
    b_x = tl.load(x + o_t[None, :, None] * stride_x_t + o_x * stride_x_f, mask=m_x, other=0.0)
    p_1 = w1 + o_k * stride_1_b + o_q * stride_1_o + o_p[None, :, None] * stride_1_i
    b_1 = tl.load(p_1, mask=(o_p < P)[None, :, None], other=0.0)
    b_h = tl.dot(b_x, b_1, input_precision="ieee").to(w2.dtype.element_ty)
    if KEEP:
        p_h = h + (o_k * Q + o_q).to(tl.int64) * stride_h_f + o_t[None, :, None] * stride_h_t
        tl.store(p_h, b_h, mask=m_t)

    # Feature k*Q + t*L + l is number k*RANK + t of block l.
    b_h = tl.permute(tl.reshape(b_h, (K, BT, RANK, L)), (3, 1, 0, 2))
    b_h = tl.reshape(b_h, (L, BT, R))
    o_r = tl.arange(0, R)[None, :, None]
    p_2 = w2 + o_l * stride_2_b + o_s[None, None, :] * stride_2_o + o_r * stride_2_i
    b_2 = tl.load(p_2, mask=(o_s < S)[None, None, :], other=0.0)
    b_z = tl.dot(b_h, b_2, input_precision="ieee")

    if INTERLEAVED:
        o_y = o_s[None, None, :] * L + o_l
    else:
        o_y = o_l * S + o_s[None, None, :]
    m_y = (o_s < S)[None, None, :] & (o_y < OUT)
    if HAS_BIAS:
        b_z += tl.load(bias + o_y, mask=m_y, other=0.0).to(tl.float32)
    b_y = b_z.to(y.dtype.element_ty)
    o_t = o_t[None, :, None]
    if INTERLEAVED:
        # Neighbouring lanes must write neighbouring outputs. AMD's code generator permutes no pointers.
        b_y = tl.permute(b_y, (1, 2, 0))
        o_y = o_s[None, :, None] * L + tl.arange(0, L)[None, None, :]
        m_y = (o_s < S)[None, :, None] & (o_y < OUT)
        o_t, m_t = tl.permute(o_t, (1, 0, 2)), tl.permute(m_t, (1, 0, 2))
    tl.store(y + o_t * OUT + o_y, b_y, mask=m_t & m_y)


def fused(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    interleaved: bool,
    keep: bool,
    config: dict[str, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and hidden features of a layer on `x (tokens, in_features)`.

    Args:
        x (Tensor): any strides; bfloat16, float16 or float32.
        w1, w2 (Tensor): `(K, Q, P)` and `(L, S, R)`, any strides, the same dtype; K, L, Q and R must
            be powers of two of which L divides Q, and Q and R at least 16.
        bias (Tensor, optional): `(out_features,)`, contiguous.
        out_features (int): features that are kept.
        interleaved (bool): the layout.
        keep (bool): whether the hidden features are wanted.
        config (dict): launch parameters.

    Returns:
        (Tensor, Tensor): `(tokens, out_features)`, contiguous, and `(tokens, K*Q)` as `new_hidden`
        says, empty unless `keep`.
    """
    tokens, in_features = x.shape
    (blocks, n_hidden, n_in), (out_blocks, n_out, _) = w1.shape, w2.shape
    y = torch.empty(tokens, out_features, dtype=x.dtype, device=x.device)
    h = new_hidden(x, (tokens,), blocks * n_hidden if keep else 0)
    if tokens == 0:
        return y, h
    compiled_for = constants(
        IN=in_features,
        OUT=out_features,
        K=blocks,
        L=out_blocks,
        P=n_in,
        S=n_out,
        RANK=n_hidden // out_blocks,
        INTERLEAVED=interleaved,
        HAS_BIAS=bias is not None,
        KEEP=keep,
        WIDE=tuning.is_wide(x, w1, w2, y),
        BP=max(16, triton.next_power_of_2(n_in)),
        BS=max(16, triton.next_power_of_2(n_out)),
        **config,
    )
    launch(
        fused_kernel,
        cdiv(tokens, config["BT"]),
        (x, w1, w2, y if bias is None else bias, y, h if keep else y),
        (tokens,),
        (*x.stride(), *w1.stride(), *w2.stride(), *h.stride()),
        compiled_for,
    )
    return y, h
