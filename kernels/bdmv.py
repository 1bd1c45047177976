"""One stage for a handful of tokens, as when a model generates: every weight is read once.

Such a call is bound by latency and by the weights' bytes. So a program takes few output rows and has
as much of them in flight as fits; and where the GPU can start a launch before the previous one has
ended, the second stage reads its weights while the first is still running.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from monarch_rocm.hidden import new_hidden
from monarch_rocm.kernels import tuning
from monarch_rocm.kernels.bdmm import launch_stage, locate, stage_arguments, strides_of
from monarch_rocm.kernels.launch import MOST, again, bind, cdiv, current_stream, launch, watched
from monarch_rocm.kernels.order import place_of_program


@triton.jit
def wait_for_previous_launch():
    """Until here, this launch may run beside the previous one; from here, the next one beside this."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
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
    XCDS: tl.constexpr,
    OVERLAP: tl.constexpr,
    FULL: tl.constexpr,
    DEAL: tl.constexpr,
    BT: tl.constexpr,
    BO: tl.constexpr,
    BI: tl.constexpr,
):
    # FULL: there are BT tokens, so that no mask keeps the loads of hidden features narrow.
    # DEAL: blocks that outputs are dealt to, so that the next stage reads block by block; 1: they stay.
    # OVERLAP 0: launches follow each other; 1: wait first; 2: read weights first, which the previous
    # launch does not write, nor any before it, since it waited for those.
    TILES: tl.constexpr = (N_OUT + BO - 1) // BO
    # Programs of a block share its inputs, and lines of its outputs.
    pid = place_of_program(XCDS)
    i_o = pid % TILES
    i_b = pid // TILES
    o_t = tl.arange(0, BT)
    m_t = o_t < (BT if FULL else tokens)
    o_o = i_o * BO + tl.arange(0, BO)
    o_row, o_y = locate(i_b, o_o, BLOCKS, N_OUT, GROUP_OUT)
    m_o = o_o < N_OUT
    if WIDE:
        o_t, o_row, o_y = o_t.to(tl.int64), o_row.to(tl.int64), o_y.to(tl.int64)
    p_w = w + i_b.to(tl.int64) * stride_w_b + o_row[:, None] * stride_w_o

    if OVERLAP == 1:
        wait_for_previous_launch()
    o_i = tl.arange(0, BI)
    o_col, o_x = locate(i_b, o_i, BLOCKS, N_IN, GROUP_IN)
    if WIDE:
        o_col = o_col.to(tl.int64)
    b_w = tl.load(p_w + o_col[None, :] * stride_w_i, mask=m_o[:, None] & (o_i < N_IN)[None, :], other=0.0)
    if OVERLAP == 2:
        wait_for_previous_launch()

    b_y = tl.zeros((BO, BT), dtype=tl.float32)
    for _ in range(0, N_IN, BI):
        m_x = (o_i < N_IN) & (o_x < IN)
        if WIDE:
            o_x = o_x.to(tl.int64)
        if BT >= 16:
            p_x = x + o_x[:, None] * stride_x_f + o_t[None, :] * stride_x_t
            b_x = tl.load(p_x, mask=m_x[:, None] & m_t[None, :], other=0.0)
            b_y = tl.dot(b_w, b_x, b_y, input_precision="ieee")
        else:
            p_x = x + o_t[:, None] * stride_x_t + o_x[None, :] * stride_x_f
            b_x = tl.load(p_x, mask=m_t[:, None] & m_x[None, :], other=0.0)
            b_y += tl.sum(b_w.to(tl.float32)[:, None, :] * b_x.to(tl.float32)[None, :, :], 2)
        o_i += BI
        o_col, o_x = locate(i_b, o_i, BLOCKS, N_IN, GROUP_IN)
        if WIDE:
            o_col = o_col.to(tl.int64)
        b_w = tl.load(p_w + o_col[None, :] * stride_w_i, mask=m_o[:, None] & (o_i < N_IN)[None, :], other=0.0)

    if DEAL > 1:
        o_y = (o_y % DEAL) * (OUT // DEAL) + o_y // DEAL
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
    config = _complete(config, x, 1, follows=False)
    return launch_stage(bdmv_kernel, 1, x, w, bias, out_features, group_in, group_out, hidden, config)


def bdmv_layer(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    interleaved: bool,
    keep: bool,
    config1: dict[str, int],
    config2: dict[str, int],
    kind: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both stages on `x (tokens, in_features)`, at most `BT` of each config.

    The host takes longer for such a call than the GPU, so both launches are remembered together and
    repeated for operands of the same kind.

    Args:
        x, w1, w2 (Tensor): any strides; w1 `(K, Q, P)`, w2 `(L, S, R)`; one dtype.
        bias (Tensor, optional): `(out_features,)`, contiguous.
        out_features (int): features that are kept.
        interleaved (bool): the layout.
        keep (bool): return the hidden features, which else lie as suits the launches.
        config1, config2 (dict): launch parameters of each stage.
        kind (object, optional): the same object for calls that are alike in dtype, device, shapes of the
            factors, `interleaved`, `keep` and configs; without it, nothing is remembered.

    Returns:
        (Tensor, Tensor): `(tokens, out_features)`, contiguous, and with `keep` `(tokens, K*Q)` as
        `new_hidden` says.
    """
    (blocks, n_hidden, _), (out_blocks, n_out, n_in) = w1.shape, w2.shape
    tokens, device = x.shape[0], x.get_device()
    # Either the second stage reads a number of each token in one go, or the first writes as many of a
    # token as its rows hold for a block: whichever are more lie side by side.
    dealt = not keep and config1["BO"] >= tokens * out_blocks
    if dealt:
        h = torch.empty(tokens, blocks * n_hidden, dtype=x.dtype, device=x.device)
    else:
        h = new_hidden(x, (tokens,), blocks * n_hidden)
    y = torch.empty(tokens, out_features, dtype=x.dtype, device=x.device)
    pointers = x.data_ptr() | w1.data_ptr() | w2.data_ptr() | (0 if bias is None else bias.data_ptr())
    strides = strides_of(x), w1.stride(), w2.stride()
    key = (id(kind), x.shape, *strides, bias is None, out_features, dealt, pointers % 16)
    known = _layers.get(key)
    if known is not None and device == torch.cuda.current_device() and not watched():
        first, programs1, second, programs2, _ = known
        stream = current_stream(device)
        again(first, programs1, stream, (x, w1, h, h))
        again(second, programs2, stream, (h, w2, y if bias is None else bias, y))
        return y, h
    if tokens == 0:
        return y, h
    config1 = _complete(config1, x, out_blocks if dealt else 1, follows=False)
    config2 = _complete(config2, x, 1, follows=True)
    group_in, group_out = 1 if dealt else n_in, n_out if interleaved else 1
    arguments1 = stage_arguments(x, w1, None, h, 1, 1, config1)
    arguments2 = stage_arguments(h, w2, bias, y, group_in, group_out, config2)
    programs1, programs2 = blocks * cdiv(n_hidden, config1["BO"]), out_blocks * cdiv(n_out, config2["BO"])
    first = launch(bdmv_kernel, programs1, *arguments1)
    second = launch(bdmv_kernel, programs2, *arguments2)
    # New tensors are aligned, so that what was compiled serves the next ones too.
    if kind and first and second and key[-1] == 0 and not torch.version.hip:
        first, second = bind(first, *arguments1[1:3]), bind(second, *arguments2[1:3])
        if len(_layers) >= MOST:
            _layers.clear()
        # While an entry holds the kind, no other object has its id.
        _layers[key] = first, programs1, second, programs2, kind
    return y, h


_layers: dict[tuple[Any, ...], tuple[Any, ...]] = {}


def _complete(config: dict[str, int], x: torch.Tensor, deal: int, follows: bool) -> dict[str, int]:
    """A config with what the call adds; `follows` where the launch before is `bdmv` and did not write `w`."""
    overlap = 0
    if overlaps(x.device):
        overlap = 2 if follows else 1
    config = config | {"FULL": x.shape[0] == config["BT"], "DEAL": deal, "OVERLAP": overlap}
    return config | {"launch_pdl": True} if overlap else config


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a launch may start before the previous one has ended: on NVIDIA's GPUs from Hopper on."""
    if device.type != "cuda" or torch.version.hip or tuning.interprets():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
