"""Matrix instructions against a product in numpy, by the lane layouts that the ISA documents tabulate."""

import numpy as np
import pytest

from cdna.bits import EmulationError
from cdna.snippet import run

# opcode: arch, rows and columns, depth, dtype
OPCODES = {
    "v_mfma_f32_32x32x8f16": ("gfx90a", 32, 8, "f16"),
    "v_mfma_f32_16x16x16f16": ("gfx90a", 16, 16, "f16"),
    "v_mfma_f32_32x32x8bf16_1k": ("gfx90a", 32, 8, "bf16"),
    "v_mfma_f32_16x16x16bf16_1k": ("gfx90a", 16, 16, "bf16"),
    "v_mfma_f32_32x32x4bf16": ("gfx90a", 32, 4, "bf16"),
    "v_mfma_f32_16x16x8bf16": ("gfx90a", 16, 8, "bf16"),
    "v_mfma_f32_32x32x2f32": ("gfx90a", 32, 2, "f32"),
    "v_mfma_f32_16x16x4f32": ("gfx90a", 16, 4, "f32"),
    "v_mfma_f32_32x32x8_f16": ("gfx942", 32, 8, "f16"),
    "v_mfma_f32_16x16x16_f16": ("gfx942", 16, 16, "f16"),
    "v_mfma_f32_32x32x8_bf16": ("gfx942", 32, 8, "bf16"),
    "v_mfma_f32_16x16x16_bf16": ("gfx942", 16, 16, "bf16"),
    "v_mfma_f32_32x32x2_f32": ("gfx942", 32, 2, "f32"),
    "v_mfma_f32_16x16x4_f32": ("gfx942", 16, 4, "f32"),
    "v_mfma_f32_32x32x16_f16": ("gfx950", 32, 16, "f16"),
    "v_mfma_f32_16x16x32_f16": ("gfx950", 16, 32, "f16"),
    "v_mfma_f32_32x32x16_bf16": ("gfx950", 32, 16, "bf16"),
    "v_mfma_f32_16x16x32_bf16": ("gfx950", 16, 32, "bf16"),
}


def patterns(values, dtype):
    """Small whole numbers as bits of that dtype; each has an exact one."""
    if dtype == "f16":
        return values.astype(np.float16).view(np.uint16).astype(np.uint32)
    bits = values.astype(np.float32).view(np.uint32)
    return bits >> 16 if dtype == "bf16" else bits


def rows_in_lanes(matrix, dtype):
    """Registers of an operand whose lane `l` holds row `l % rows`, the columns in groups of lanes."""
    rows, columns = matrix.shape
    groups = 64 // rows
    each = columns // groups
    per_register = 1 if dtype == "f32" else 2
    registers = np.zeros((each // per_register, 64), np.uint32)
    for lane in range(64):
        for i in range(each):
            bits = patterns(matrix[lane % rows, lane // rows * each + i], dtype)
            registers[i // per_register, lane] |= np.uint32(bits) << np.uint32(16 * (i % per_register))
    return registers


def row_in_result(size, lane, register):
    """The tables of the ISA documents, written out."""
    if size == 16:
        return [0, 4, 8, 12][lane // 16] + register
    return [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27][register] + 4 * (lane // 32)


@pytest.mark.parametrize("opcode", OPCODES)
@pytest.mark.parametrize("added", ["registers", "constant"])
def test_products_with_their_lane_layouts(opcode, added):
    arch, size, depth, dtype = OPCODES[opcode]
    generator = np.random.default_rng(0)
    a, b = (generator.integers(-8, 9, shape).astype(np.float32) for shape in ((size, depth), (depth, size)))
    c = generator.integers(-99, 100, (size, size)).astype(np.float32)
    one, two = rows_in_lanes(a, dtype), rows_in_lanes(b.T, dtype)
    count, width = size * size // 64, len(one)
    vectors = dict(enumerate(one))
    vectors |= {10 + i: values for i, values in enumerate(two)}
    for register in range(count):
        rows = [row_in_result(size, lane, register) for lane in range(64)]
        vectors[20 + register] = c[rows, np.arange(64) % size]
    operand = (lambda first: f"v[{first}:{first + width - 1}]") if width > 1 else (lambda first: f"v{first}")
    last = f"v[20:{19 + count}]" if added == "registers" else "1.0"
    text = f"{opcode} v[40:{39 + count}], {operand(0)}, {operand(10)}, {last}"
    m = run(text, vectors=vectors, arch=arch, active=np.arange(64) < 5)  # the mask does not count
    expected = a @ b + (c if added == "registers" else 1)
    for register in range(count):
        rows = [row_in_result(size, lane, register) for lane in range(64)]
        got = m.registers.vector_file[40 + register][0].view(np.float32)
        np.testing.assert_array_equal(got, expected[rows, np.arange(64) % size])


def test_accumulation_in_place_and_in_accumulation_registers():
    one = rows_in_lanes(np.ones((16, 16), np.float32), "bf16")
    text = "\n".join(f"v_accvgpr_write_b32 a{i}, 0" for i in range(4))
    text += "\n" + "v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[0:1], a[0:3]\n" * 3
    text += "v_accvgpr_read_b32 v9, a3"
    m = run(text, vectors=dict(enumerate(one)))
    assert (m.registers.vector_file[9][0].view(np.float32) == 48).all()


@pytest.mark.parametrize(
    "text",
    [
        "v_mfma_f32_32x32x1_2b_f32 v[0:31], v32, v33, v[0:31]",
        "v_mfma_f32_16x16x1f32 v[0:3], v4, v5, v[0:3]",
        "v_mfma_f32_32x32x4_xf32 v[0:15], v[16:17], v[18:19], v[0:15]",
        "v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[4:5], v[6:7], v[0:3]",
        "v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3] cbsz:1",
    ],
)
def test_what_is_not_modelled_raises_by_name(text):
    with pytest.raises(EmulationError, match=text.split()[0]):
        run(text)
