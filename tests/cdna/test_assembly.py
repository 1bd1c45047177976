"""The text of instructions, and what the machine does with programs as a whole."""

import numpy as np
import pytest

from cdna import machine
from cdna.assembly import parse_instruction
from cdna.bits import EmulationError
from cdna.snippet import run


def test_operands_and_modifiers():
    ins = parse_instruction(
        "v_pk_fma_f32 v[0:1], a[2:3], s[4:5], -1.5 op_sel_hi:[0,1,0] neg_lo:[1,0,0] clamp"
    )
    assert ins.opcode == "v_pk_fma_f32"
    assert [(o.kind, o.index, o.count) for o in ins.operands[:3]] == [("v", 0, 2), ("v", 258, 2), ("s", 4, 2)]
    assert ins.operands[3].value == -1.5
    assert ins.modifiers == {"op_sel_hi": [0, 1, 0], "neg_lo": [1, 0, 0], "clamp": True}
    ins = parse_instruction("v_add_f32_e64 v0, -|v1|, sext(v2)")
    assert (ins.operands[1].negate, ins.operands[1].absolute, ins.operands[2].extend) == (True, True, True)
    ins = parse_instruction('ds_swizzle_b32 v1, v2 offset:swizzle(BITMASK_PERM,"p0p1p")')
    assert ins.modifiers == {"offset": 'swizzle(BITMASK_PERM,"p0p1p")'}
    ins = parse_instruction("buffer_load_dwordx4 v12, s[4:7], 0 offen offset:0x10 sc0 lds")
    assert ins.modifiers == {"offen": True, "offset": 16, "sc0": True, "lds": True}
    assert parse_instruction("s_waitcnt vmcnt(3) lgkmcnt(0)").modifiers == {"vmcnt": 3, "lgkmcnt": 0}


@pytest.mark.parametrize(
    ("text", "kind", "bits"),
    [
        ("-1", "b32", 0xFFFFFFFF),
        ("-1", "b64", 0xFFFFFFFFFFFFFFFF),
        ("0xffffffff", "b64", 0xFFFFFFFF),
        ("1.0", "f32", 0x3F800000),
        ("1.0", "f16", 0x3C00),
        ("0.15915494", "f32", 0x3E22F983),
        ("-4.0", "b32", 0xC0800000),
    ],
)
def test_constants(text, kind, bits):
    assert parse_instruction(f"v_mov_b32 v0, {text}").operands[1].bits(kind) == bits


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("buffer_load_dword v1, s[0:3], 0 offen lds", "async"),
        ("global_load_lds_dwordx4 v[0:1], off", "async"),
        ("buffer_load_dword v1, v2, s[0:3], 0 offen", "load"),
        ("global_store_dword v[0:1], v2, off", "store"),
        ("ds_read_b32 v0, v1", "lds_read"),
        ("ds_bpermute_b32 v0, v1, v2", "lds_exchange"),
        ("v_mfma_f32_16x16x4_f32 v[0:3], v4, v5, 0", "mfma"),
        ("v_add_u32 v0, v1, v2", "vector"),
        ("s_add_u32 s0, s1, s2", "scalar"),
    ],
)
def test_classes(text, kind):
    assert parse_instruction(text).kind == kind


def test_what_ran_is_counted():
    text = "v_mov_b32_e32 v1, 0\nglobal_load_dword v8, v0, s[0:1]\nds_write_b32 v0, v0\ns_waitcnt vmcnt(0)"
    m = run(
        text,
        vectors={0: np.arange(64) * 128},
        memory=np.zeros(64 * 128, np.uint8),
        lds=64 * 128,
        groups=3,
        detailed=True,
    )
    assert m.counters.instructions == {"vector": 3, "load": 3, "lds_write": 3, "wait": 3, "scalar": 3}
    assert m.counters.line_factor() == 32  # 4 bytes of every line of 128
    assert m.counters.conflict_factor() == 32


def test_endless_loops_end(monkeypatch):
    monkeypatch.setattr(machine, "LIMIT", 100)
    with pytest.raises(EmulationError, match="still running"):
        run("top:\ns_branch top")


def test_registers_that_nothing_wrote_are_nan():
    m = run("v_add_f32_e32 v1, 1.0, v7")
    assert np.isnan(m.registers.vector_file[1].view(np.float32)).all()


def test_unknown_names_raise():
    for text in ("v_mov_b32_e32 v0, ttmp3", "x_made_up v0", "v_mov_b32_e32 v0, v1 unheard"):
        with pytest.raises(EmulationError, match=r"ttmp3|x_made_up|unheard"):
            run(text)
