"""Bit patterns and the numbers they stand for. A register is uint32, whatever it holds."""

import numpy as np

U16, U32, U64 = np.uint16, np.uint32, np.uint64
I16, I32, I64 = np.int16, np.int32, np.int64
F16, F32, F64 = np.float16, np.float32, np.float64
LANES = np.arange(64)
LOW = U32(0xFFFF)


class EmulationError(Exception):
    """The program did what no correct program does, or what is not modelled."""


def from_float(x):
    """The bits of float32 values."""
    return np.ascontiguousarray(x, F32).view(U32)


def half(x):
    """The float16 in the low bits."""
    return (x & LOW).astype(U16).view(F16)


def from_half(x):
    """The bits of float16 values, rounded to nearest even, in the low half."""
    return np.ascontiguousarray(x).astype(F16).view(U16).astype(U32)


def from_half_toward_zero(x):
    """The same, rounded toward zero."""
    nearest = np.ascontiguousarray(x).astype(F16)
    away = np.abs(nearest.astype(F64)) > np.abs(x.astype(F64))
    away &= np.isfinite(x)
    return (nearest.view(U16) - away.astype(U16)).astype(U32)


def bfloat(x):
    """The bfloat16 in the low bits."""
    return (x << U32(16)).view(F32)


def from_bfloat(x):
    """The bits of float32 values rounded to bfloat16, to nearest even, in the low half."""
    bits = from_float(x)
    rounded = (bits.astype(U64) + U64(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U64(16)
    return np.where(np.isnan(x), U64(0x7FFF), rounded).astype(U32)


def join(low, high):
    """The 64-bit number of two registers."""
    return low.astype(U64) | (high.astype(U64) << U64(32))


def split(x):
    """The two registers of a 64-bit number."""
    return x.astype(U32), (x >> U64(32)).astype(U32)


def mask_of(lanes):
    """The 64-bit mask of booleans `(waves, 64)`."""
    return (lanes.astype(U64) << LANES.astype(U64)).sum(1, dtype=U64)


def lanes_of(mask):
    """The booleans `(waves, 64)` of a 64-bit mask."""
    return ((mask[:, None] >> LANES.astype(U64)) & U64(1)) == 1


def signed(x):
    """The same bits as a signed number."""
    return x.view(I64 if x.dtype == U64 else I32)


def sign_extended(x, bits):
    """The low `bits` as a signed number of 32 bits."""
    top = U32(1 << (bits - 1))
    return ((x & U32((1 << bits) - 1)) ^ top) - top


def reversed_bits(x):
    out = np.zeros_like(x)
    for i in range(32):
        out |= ((x >> U32(i)) & U32(1)) << U32(31 - i)
    return out


def first_high(x):
    """How many zeros lie above the highest one; all ones where there is none."""
    out = np.full(x.shape, 0xFFFFFFFF, U32)
    for i in range(32):
        out = np.where((x >> U32(i)) & U32(1), U32(31 - i), out)
    return out


def first_low(x):
    """The position of the lowest one; all ones where there is none."""
    return np.where(x == 0, U32(0xFFFFFFFF), np.bitwise_count((x & (~x + U32(1))) - U32(1)).astype(U32))


def high_product(a, b):
    return ((a.astype(U64) * b.astype(U64)) >> U64(32)).astype(U32)


def high_product_signed(a, b):
    return ((signed(a).astype(I64) * signed(b).astype(I64)) >> 32).astype(I32).view(U32)


def field(x, offset, width):
    """`width` bits from `offset`, unsigned; a width of 32 or more is all that is left."""
    ones = np.where(width >= 32, U64(0xFFFFFFFF), (U64(1) << width.astype(U64)) - U64(1))
    return ((x >> offset).astype(U64) & ones).astype(U32)


def field_signed(x, offset, width):
    """The same, the topmost of the bits being the sign."""
    bits = field(x, offset, width)
    sign = U32(1) << ((width - U32(1)) & U32(31))
    extended = (bits ^ sign) - sign
    return np.where(width == 0, U32(0), np.where(width >= 32, bits, extended)).astype(U32)
