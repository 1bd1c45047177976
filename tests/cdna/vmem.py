"""Vector memory instructions: buffer and global loads and stores, and copies straight into LDS."""

import re

import numpy as np

from cdna.bits import I64, LANES, LOW, U32, U64, EmulationError, join
from cdna.registers import narrow

SIZES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "short": 2, "ushort": 2, "sshort": 2}
CACHE = ("glc", "slc", "nt", "sc0", "sc1")
MAINTENANCE = {"buffer_wbl2", "buffer_inv", "buffer_wbinvl1", "buffer_wbinvl1_vol"}


def decode(ins):
    if ins.opcode in MAINTENANCE:
        return lambda m, g: None
    found = re.fullmatch(r"(buffer|global)_(load|store)_(lds_)?(\w+?)(_d16)?(_hi)?", ins.opcode)
    if not found or found[4] not in SIZES:
        raise ins.unknown()
    kind, action, to_lds, name, d16, high = found.groups()
    to_lds = bool(to_lds or "lds" in ins.modifiers)
    ins.allow("offset", "lds", *CACHE, *(("offen",) if kind == "buffer" else ()))
    find = {"buffer": _buffer, "global": _global}[kind](ins, SIZES[name], action, to_lds)
    # What a half-word load fills; a store takes the same half from its register.
    half = (1 if high else 0) if d16 else None
    if action == "store":
        return _store(ins, find, SIZES[name], half)
    if to_lds:
        return _copy(ins, find, SIZES[name])
    return _load(ins, find, SIZES[name], "i16" if name == "sshort" else "", half)


def _buffer(ins, size, action, to_lds):
    """Addresses of a raw buffer, whose descriptor bounds it: what lies past the end is not touched."""
    operands = ins.operands if to_lds and len(ins.operands) == 3 else ins.operands[1:]
    lane_offset, descriptor, wave_offset = operands
    constant = ins.modifiers.get("offset", 0)

    def find(m, g):
        r = m.registers
        base = join(r.scalar(descriptor, g), r.scalar(descriptor, g, 1)) & U64(0xFFFFFFFFFFFF)
        limit = r.scalar(descriptor, g, 2).astype(I64)[:, None]
        shift = r.scalar(wave_offset, g).astype(I64)[:, None]
        offset = np.full((r.count(g), 64), constant, I64)
        if "offen" in ins.modifiers:
            offset = offset + r.lanes(lane_offset, g)
        inside = offset < limit - shift
        if (r.active[g] & inside & (offset + size > limit - shift)).any():
            raise EmulationError(f"an access across the end of a buffer: {ins.text}")
        return base[:, None] + (offset + shift).astype(U64), r.active[g] & inside

    return find


def _global(ins, size, action, to_lds):
    operands = ins.operands
    lane_address, base = operands[0] if action == "store" or to_lds else operands[1], operands[-1]
    constant = ins.modifiers.get("offset", 0)

    def find(m, g):
        r = m.registers
        if base.text == "off":
            address = r.lanes64(lane_address, g)
        else:
            address = r.scalar64(base, g)[:, None] + r.lanes(lane_address, g).astype(U64)
        return (address.astype(I64) + constant).astype(U64), r.active[g]

    return find


def _who(m, g):
    """Waves, the barriers that their workgroups have passed, and how many waves one has."""
    waves = np.arange(m.waves)[g][:, None]
    return waves, m.lds.epoch[m.workgroup[g]][:, None], m.waves_per_group


def _located(ins, find, size, reads):
    def locate(m, g):
        address, live = find(m, g)
        offset = m.heap.offsets(address, live, size, *_who(m, g), reads, ins.text)
        m.counters.memory(offset, live, size)
        m.registers.waits.issue("vmcnt", g)
        return offset, live

    return locate


def _load(ins, find, size, kind, half):
    locate, out = _located(ins, find, size, True), ins.operands[0]

    def run(m, g):
        offset, live = locate(m, g)
        for k, word in enumerate(m.heap.load(offset, live, size)):
            m.registers.load_lanes(out.index + k, g, narrow(word, kind), half, "vmcnt")

    return run


def _store(ins, find, size, half):
    locate = _located(ins, find, size, False)
    data = ins.operands[0] if ins.opcode.startswith("buffer") else ins.operands[1]

    def run(m, g):
        words = [m.registers.lanes(data, g, word=k) for k in range(max(1, size // 4))]
        if size == 2:
            words = [words[0] >> U32(16) if half else words[0] & LOW]
        offset, live = locate(m, g)
        m.heap.store(offset, live, words, size, *_who(m, g), ins.text)

    return run


def _copy(ins, find, size):
    """A load whose lanes write LDS side by side, from where M0 says."""
    locate = _located(ins, find, size, True)
    constant = ins.modifiers.get("offset", 0)

    def run(m, g):
        offset, live = locate(m, g)
        words = m.heap.load(offset, live, size)
        start = (m.registers.m0(g).astype(I64) & 0x3FFFF)[:, None] + constant
        m.lds.store(g, start + LANES * size, m.registers.active[g], words, size, ins.text, "vmcnt")

    return run
