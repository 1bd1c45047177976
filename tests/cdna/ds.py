"""LDS instructions: reads and writes of all widths, and exchanges between lanes."""

import re

import numpy as np

from cdna.bits import I64, LANES, LOW, U32
from cdna.registers import narrow

READS = {"u8": 1, "i8": 1, "u16": 2, "i16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}


def decode(ins):
    op = ins.opcode
    if found := re.fullmatch(r"ds_(read|write)2(st64)?_b(32|64)", op):
        size = int(found[3]) // 8
        return {"read": _read_two, "write": _write_two}[found[1]](ins, size, size * (64 if found[2] else 1))
    if (found := re.fullmatch(r"ds_read_(\w+?)(_d16)?(_hi)?", op)) and found[1] in READS:
        return _read(ins, READS[found[1]], found[1], (1 if found[3] else 0) if found[2] else None)
    if found := re.fullmatch(r"ds_write_b(8|16|32|64|96|128)(_d16_hi)?", op):
        return _write(ins, int(found[1]) // 8, bool(found[2]))
    if op in OTHERS:
        return OTHERS[op](ins)
    raise ins.unknown()


def smallest_access(program):
    """In bytes, at most 4."""
    sizes = [4]
    for ins in program.instructions:
        if found := re.match(r"ds_(?:read|write)_[ubi](8|16)(?:_|$)", ins.opcode):
            sizes.append(int(found[1]) // 8)
    return min(sizes)


def _load(m, g, address, size, ins):
    live = m.registers.active[g]
    words = m.lds.load(g, address, live, size, ins.text)
    m.counters.lds(address, live, size)
    return words


def _store(m, g, address, words, size, ins):
    live = m.registers.active[g]
    m.lds.store(g, address, live, words, size, ins.text, "lgkmcnt")
    m.counters.lds(address, live, size)


def _address(m, g, operand, offset):
    """The sum wraps: the compiler makes negative addresses that an offset brings back into range."""
    return (m.registers.lanes(operand, g) + U32(offset)).astype(I64)


def _words(m, g, operand, size):
    return [m.registers.lanes(operand, g, word=k) for k in range(max(1, size // 4))]


def _read(ins, size, kind, half):
    ins.allow("offset")
    out, at = ins.operands

    def run(m, g):
        m.registers.waits.issue("lgkmcnt", g)
        words = _load(m, g, _address(m, g, at, ins.modifiers.get("offset", 0)), size, ins)
        for k, word in enumerate(words):
            m.registers.load_lanes(out.index + k, g, narrow(word, kind), half, "lgkmcnt")

    return run


def _read_two(ins, size, step):
    ins.allow("offset0", "offset1")
    out, at = ins.operands

    def run(m, g):
        m.registers.waits.issue("lgkmcnt", g)
        words = []
        for name in ("offset0", "offset1"):
            address = _address(m, g, at, step * ins.modifiers.get(name, 0))
            words += _load(m, g, address, size, ins)
        for k, word in enumerate(words):
            m.registers.load_lanes(out.index + k, g, word, None, "lgkmcnt")

    return run


def _write(ins, size, high):
    ins.allow("offset")
    at, data = ins.operands

    def run(m, g):
        words = _words(m, g, data, size)
        if high:
            words = [words[0] >> U32(16)]
        m.registers.waits.issue("lgkmcnt", g)
        _store(m, g, _address(m, g, at, ins.modifiers.get("offset", 0)), words, size, ins)

    return run


def _write_two(ins, size, step):
    ins.allow("offset0", "offset1")
    at, *data = ins.operands

    def run(m, g):
        m.registers.waits.issue("lgkmcnt", g)
        for name, source in zip(("offset0", "offset1"), data, strict=True):
            address = _address(m, g, at, step * ins.modifiers.get(name, 0))
            _store(m, g, address, _words(m, g, source, size), size, ins)

    return run


def _read_transposed(ins):
    """gfx950: 16 lanes read four rows of 16 numbers of 16 bits, and each gets one column."""
    ins.allow("offset")
    out, at = ins.operands

    def run(m, g):
        m.registers.waits.issue("lgkmcnt", g)
        words = _load(m, g, _address(m, g, at, ins.modifiers.get("offset", 0)), 8, ins)
        numbers = np.stack([part for word in words for part in (word & LOW, word >> U32(16))], -1)
        rows = numbers.reshape(-1, 4, 4, 16)  # waves, groups of lanes, rows, columns
        columns = rows.transpose(0, 1, 3, 2).reshape(-1, 64, 4)
        for k in (0, 1):
            pair = columns[..., 2 * k] | (columns[..., 2 * k + 1] << U32(16))
            m.registers.load_lanes(out.index + k, g, pair, None, "lgkmcnt")

    return run


def _exchange(move):
    """An exchange through the LDS hardware, which touches no memory."""

    def decode_exchange(ins):
        ins.allow("offset")

        def run(m, g):
            value = move(m, g, ins)
            m.registers.waits.issue("lgkmcnt", g)
            m.registers.load_lanes(ins.operands[0].index, g, value, None, "lgkmcnt")

        return run

    return decode_exchange


def _lane_numbers(m, g, ins):
    return (_address(m, g, ins.operands[1], ins.modifiers.get("offset", 0)) // 4) & 63


def _pull(m, g, ins):
    lane, source = _lane_numbers(m, g, ins), m.registers.lanes(ins.operands[2], g)
    active = np.take_along_axis(m.registers.active[g], lane, 1)
    return np.where(active, np.take_along_axis(source, lane, 1), U32(0))


def _push(m, g, ins):
    lane, source = _lane_numbers(m, g, ins), m.registers.lanes(ins.operands[2], g)
    out = np.zeros_like(source)
    wave, active = np.nonzero(m.registers.active[g])
    out[wave, lane[wave, active]] = source[wave, active]
    return out


def _swizzle(m, g, ins):
    pattern = ins.modifiers.get("offset", 0)
    if not isinstance(pattern, int):
        pattern = _swizzle_pattern(ins, pattern)
    if pattern & 0x8000:
        lane = (LANES & ~3) | ((pattern >> (2 * (LANES & 3))) & 3)
    else:
        inner = (((LANES & 31) & (pattern & 31)) | ((pattern >> 5) & 31)) ^ ((pattern >> 10) & 31)
        lane = (LANES & 32) | inner
    source = m.registers.lanes(ins.operands[1], g)
    return np.where(m.registers.active[g][:, lane], source[:, lane], U32(0))


def _swizzle_pattern(ins, text):
    """The number behind the names that the disassembler prints."""
    found = re.fullmatch(r"swizzle\((\w+),\s*(.*)\)", text)
    if not found:
        raise ins.unknown("swizzle")
    name, arguments = found[1], [part.strip() for part in found[2].split(",")]
    if name == "SWAP":
        return int(arguments[0]) << 10 | 0x1F
    if name == "REVERSE":
        return (int(arguments[0]) - 1) << 10 | 0x1F
    if name == "QUAD_PERM":
        return 0x8000 | sum(int(lane) << (2 * i) for i, lane in enumerate(arguments))
    if name == "BROADCAST":
        group, lane = map(int, arguments)
        return lane << 5 | (0x1F & ~(group - 1))
    raise ins.unknown("swizzle")


OTHERS = {
    "ds_read_b64_tr_b16": _read_transposed,
    "ds_bpermute_b32": _exchange(_pull),
    "ds_permute_b32": _exchange(_push),
    "ds_swizzle_b32": _exchange(_swizzle),
}
