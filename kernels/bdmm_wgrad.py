"""Weight gradient of the block-diagonal product: a sum over tokens for every block.

Token ranges are summed by separate programs into separate buffers, never by atomics, so that two
runs are equal to the bit.
"""

import torch
import triton
import triton.language as tl

from monarch_rocm.kernels import tuning
from monarch_rocm.kernels.bdmm import locate
from monarch_rocm.kernels.launch import cdiv, constants, launch
from monarch_rocm.kernels.order import place_of_program


@triton.jit
def bdmm_wgrad_kernel(
    g,
    a,
    dw,
    tokens,
    span,
    stride_g_t,
    stride_g_f,
    stride_a_t,
    stride_a_f,
    G_FEATURES: tl.constexpr,
    A_FEATURES: tl.constexpr,
    BLOCKS: tl.constexpr,
    N_OUT: tl.constexpr,
    N_IN: tl.constexpr,
    GROUP_OUT: tl.constexpr,
    GROUP_IN: tl.constexpr,
    WIDE: tl.constexpr,
    XCDS: tl.constexpr,
    BO: tl.constexpr,
    BI: tl.constexpr,
    BT: tl.constexpr,
):
    TILES_O: tl.constexpr = (N_OUT + BO - 1) // BO
    TILES_I: tl.constexpr = (N_IN + BI - 1) // BI
    # All tiles of a block read the same tokens.
    pid = place_of_program(XCDS if TILES_O * TILES_I > 1 else 1)
    i_i = pid % TILES_I
    i_o = pid // TILES_I % TILES_O
    i_b = pid // (TILES_I * TILES_O) % BLOCKS
    i_s = pid // (TILES_I * TILES_O * BLOCKS)

    o_o = i_o * BO + tl.arange(0, BO)
    o_i = i_i * BI + tl.arange(0, BI)
    o_row, o_g = locate(i_b, o_o, BLOCKS, N_OUT, GROUP_OUT)
    o_col, o_a = locate(i_b, o_i, BLOCKS, N_IN, GROUP_IN)
    m_o = o_o < N_OUT
    m_i = o_i < N_IN
    m_g = m_o & (o_g < G_FEATURES)
    m_a = m_i & (o_a < A_FEATURES)
    if WIDE:
        o_row, o_g, o_a = o_row.to(tl.int64), o_g.to(tl.int64), o_a.to(tl.int64)

    start = i_s * span
    stop = tl.minimum(start + span, tokens)
    b_dw = tl.zeros((BO, BI), dtype=tl.float32)
    for t in range(start, stop, BT):
        o_t = t + tl.arange(0, BT)
        m_t = o_t < stop
        if WIDE:
            o_t = o_t.to(tl.int64)
        # Both tiles are addressed as the product wants them, without a transpose in the kernel.
        p_g = g + o_g[:, None] * stride_g_f + o_t[None, :] * stride_g_t
        b_g = tl.load(p_g, mask=m_g[:, None] & m_t[None, :], other=0.0)
        p_a = a + o_t[:, None] * stride_a_t + o_a[None, :] * stride_a_f
        b_a = tl.load(p_a, mask=m_t[:, None] & m_a[None, :], other=0.0)
        b_dw = tl.dot(b_g, b_a, b_dw, input_precision="ieee")

    dw += (i_s.to(tl.int64) * BLOCKS + i_b) * (N_OUT * N_IN)
    p_dw = dw + o_row[:, None] * N_IN + o_col[None, :]
    tl.store(p_dw, b_dw.to(dw.dtype.element_ty), mask=m_o[:, None] & m_i[None, :])


def bdmm_wgrad(
    g: torch.Tensor,
    a: torch.Tensor,
    blocks: int,
    n_out: int,
    n_in: int,
    group_out: int,
    group_in: int,
    config: dict[str, int],
) -> torch.Tensor:
    """Sum over tokens of the outer products of `g (tokens, out)` and `a (tokens, in)`, block by block.

    Args:
        g (Tensor): gradient of the stage's output, any strides; bfloat16, float16 or float32.
        a (Tensor): the stage's input, any strides, the same dtype.
        blocks, n_out, n_in (int): shape of the factor.
        group_out, group_in (int): the index maps' groups of `g` and `a`.
        config (dict): launch parameters.

    Returns:
        Tensor: `(blocks, n_out, n_in)`, summed in float32, in the dtype of `g`.
    """
    tokens = g.shape[0]
    config = dict(config)
    tiles = blocks * cdiv(n_out, config["BO"]) * cdiv(n_in, config["BI"])
    steps = cdiv(tokens, config["BT"])
    splits = min(max(1, config.pop("PROGRAMS") // tiles), max(1, steps // config.pop("MIN_STEPS")))
    span = cdiv(max(1, steps), splits) * config["BT"]
    dtype = g.dtype if splits == 1 else torch.float32
    dw = torch.empty(splits, blocks, n_out, n_in, dtype=dtype, device=g.device)
    compiled_for = constants(
        G_FEATURES=g.shape[1],
        A_FEATURES=a.shape[1],
        BLOCKS=blocks,
        N_OUT=n_out,
        N_IN=n_in,
        GROUP_OUT=group_out,
        GROUP_IN=group_in,
        WIDE=tuning.is_wide(g, a, dw),
        XCDS=tuning.chiplets(g.device),
        **config,
    )
    strides = (*g.stride(), *a.stride())
    launch(bdmm_wgrad_kernel, tiles * splits, (g, a, dw), (tokens, span), strides, compiled_for)
    return dw[0] if splits == 1 else dw.sum(0).to(g.dtype)
