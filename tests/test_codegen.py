"""`monarch-rocm codegen`: what it reads from assembly, what its gate refuses, and that the shipped
kernels pass, compiled for the three CDNA targets without ROCm. Nothing runs on AMD hardware.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from unittest import mock

import pytest

from monarch_rocm import cli, dispatch
from monarch_rocm.codegen import command, compiling, gate, layers, stored
from monarch_rocm.codegen.assembly import read, waves
from monarch_rocm.codegen.compiling import Row
from monarch_rocm.codegen.stored import Allowed, Executed
from monarch_rocm.kernels import tuning

# Cut from what Triton 3.9 prints. Triton 3.6 has no ".L" before the names of numbers.
ASSEMBLY = """
	.amdgcn_target "amdgcn-amd-amdhsa-unknown-gfx942"
bdmm_kernel:                            ; @bdmm_kernel
.Lfunc_begin0:
	.file	1 "/tmp" "bdmm.py"
	s_load_dwordx4 s[4:7], s[4:5], 0x0
	buffer_load_dwordx4 v[0:3], v8, s[4:7], 0 offen
.LBB0_1:                                ; =>This Loop Header: Depth=1
	.loc	1 69 11 is_stmt 1               ; bdmm.py:69:11
	s_cbranch_execz .LBB0_2
.LBB0_2:                                ;   Parent Loop BB0_1 Depth=1
	buffer_load_ushort v5, v8, s[4:7], 0 offen
	buffer_load_short_d16_hi v5, v8, s[4:7], 0 offen
	buffer_load_dwordx4 v6, s[4:7], 0 offen lds
	ds_read2_b64 v[0:3], v4 offset1:16
	ds_read_u16_d16_hi v4, v9
	ds_write_b16 v4, v9
	v_mfma_f32_32x32x8_bf16 v[0:15], v[0:1], v[2:3], v[0:15]
	s_waitcnt lgkmcnt(0)
	s_cbranch_scc1 .LBB0_2
; %bb.3:
	global_load_dword v3, v[0:1], off
	s_cbranch_scc1 .LBB0_1
.LBB0_4:
	buffer_store_short v9, v60, s[12:15], 0 offen
	s_endpgm
.Lfunc_end0:
	.set .Lbdmm_kernel.num_vgpr, 98
	.set .Lbdmm_kernel.num_agpr, 32
; TotalNumSgprs: 30
; TotalNumVgprs: 132
    .private_segment_fixed_size: 0
    .sgpr_spill_count: 1
    .vgpr_spill_count: 2
"""


@pytest.mark.parametrize("assembly", [ASSEMBLY, ASSEMBLY.replace(".set .L", ".set ")], ids=["3.9", "3.6"])
def test_assembly_is_counted(assembly):
    report = read(assembly, "gfx942", shared=16384, num_warps=4)
    assert (report.vgpr, report.agpr, report.sgpr, report.lds) == (98, 32, 30, 16384)
    assert (report.vector_spills, report.scalar_spills) == (2, 1)
    assert report.waves == 3
    assert report.mfma == {"v_mfma_f32_32x32x8_bf16": 1}
    assert report.atomics == {}
    # The innermost loop, where it can be seen; the outer one's load is not in it.
    assert report.loop.instructions == 9
    assert report.loop.loads == {2: 2, 16: 1}
    assert report.loop.lds_reads == {16: 1, 2: 1}
    assert report.loop.lds_writes == {2: 1}
    assert report.loop.classes == {
        "load": 3, "lds read": 2, "lds write": 1, "mfma": 1, "wait": 1, "salu": 1
    }  # fmt: skip
    assert report.whole.loads == {2: 2, 4: 1, 16: 2}
    assert report.whole.stores == {2: 1}


def test_digest_is_of_the_instructions_alone():
    def digest(assembly):
        return read(assembly, "gfx942", 0, 4).digest

    assert digest(ASSEMBLY) == digest(ASSEMBLY.replace('"/tmp"', '"/elsewhere"').replace("Depth=1", ""))
    assert digest(ASSEMBLY) != digest(ASSEMBLY.replace("lgkmcnt(0)", "lgkmcnt(1)"))


def test_a_kernel_without_loops_is_hot_all_over():
    report = read(ASSEMBLY.replace("s_cbranch_scc1", "s_cbranch_scc1 .LBB0_4 ;"), "gfx942", 0, 4)
    assert report.loop is None
    assert report.hot is report.whole


def test_foreign_assembly_is_refused():
    with pytest.raises(ValueError, match="num_vgpr"):
        read("ret", "gfx942", 0, 4)
    with pytest.raises(ValueError, match="how much does buffer_load_format_xyz"):
        read(ASSEMBLY.replace("buffer_load_ushort", "buffer_load_format_xyz"), "gfx942", 0, 4)


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "num_warps", "fit"),
    [
        ("gfx942", 24, 0, 4, 8),
        ("gfx942", 64, 0, 4, 8),
        ("gfx942", 65, 0, 4, 7),
        ("gfx942", 128, 0, 8, 4),
        ("gfx942", 512, 0, 4, 1),
        ("gfx942", 64, 32768, 4, 2),
        ("gfx950", 64, 32768, 4, 5),
        ("gfx942", 64, 65536, 8, 2),
        ("gfx942", 512, 0, 8, 0),
    ],
)
def test_waves_are_bounded_by_registers_and_local_memory(arch, registers, shared, num_warps, fit):
    assert waves(arch, registers, shared, num_warps) == fit


def row(arch="gfx942", **changes):
    report = replace(read(ASSEMBLY, "gfx942", 16384, 4), vector_spills=0, scalar_spills=0)
    hot = {name: changes.pop(name) for name in ("loads", "lds_reads") if name in changes}
    report = replace(report, loop=replace(report.loop, **{"loads": {16: 1}, "lds_reads": {8: 1}} | hot))
    return Row(arch, "bdmm", "a layer", "forward 1", "fp32", {}, replace(report, **changes))


def rules(*rows, exceptions=(), executed=None, budgets=None):
    return [failure.rule for failure in gate.judge(rows, exceptions, executed or {}, budgets)]


def test_sound_code_passes():
    assert rules(row()) == []


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("vector spills", {"vector_spills": 1}),
        ("vector spills", {"scratch": 4}),
        ("scalar spills", {"scalar_spills": 1}),
        ("local memory", {"lds": 64 * 1024 + 1}),
        ("local memory", {"lds": 160 * 1024 + 1, "arch": "gfx950"}),
        ("narrow loads", {"loads": {16: 4, 2: 1}}),
        ("narrow local reads", {"lds_reads": {1: 1}}),
        ("xf32", {"mfma": {"v_mfma_f32_16x16x8_xf32": 1}}),
        ("atomics", {"atomics": {"global_atomic_add_f32": 1}}),
    ],
)
def test_each_rule_refuses_and_an_exception_allows(rule, changes):
    broken = row(**changes)
    assert rules(broken) == [rule]
    assert rules(broken, exceptions=[Allowed(rule, "* | bdmm | *", "why")]) == []
    assert rules(broken, exceptions=[Allowed(rule, "* | fused | *", "why")]) == [rule]


def test_gfx950_has_more_local_memory():
    assert rules(row("gfx950", lds=160 * 1024)) == []


def test_an_exception_that_nothing_needs_is_refused():
    """Where budgets are compared: another Triton may well spill nothing."""
    sound = row()
    budgets = {sound.key: stored.numbers(sound)}
    needless = Allowed("vector spills", "gfx942 | *", "why")
    assert rules(sound, exceptions=[needless], budgets=budgets) == ["vector spills"]
    assert rules(sound, exceptions=[needless]) == []
    elsewhere = Allowed("vector spills", "gfx90a | *", "not compiled this time")
    assert rules(sound, exceptions=[elsewhere], budgets=budgets) == []


def test_an_exception_is_needless_only_once_all_its_architectures_were_judged():
    """`monarch-rocm codegen --arch gfx942` must not ask to remove what gfx950 needs."""
    rows = [row(arch) for arch in ("gfx90a", "gfx942", "gfx950")]
    budgets = {each.key: stored.numbers(each) for each in rows}
    everywhere, two = (Allowed("vector spills", f"{archs} | *", "why") for archs in ("*", "gfx9[04]*"))
    assert rules(*rows[:2], exceptions=[everywhere], budgets=budgets) == []
    assert rules(*rows[:2], exceptions=[two], budgets=budgets) == ["vector spills"]
    assert rules(*rows, exceptions=[everywhere, two], budgets=budgets) == ["vector spills"] * 2


def test_bank_conflicts_count_where_the_interpreter_ran_this_very_code():
    sound = row()

    def executed(conflicts, digest):
        return {sound.key: Executed(digest, conflicts, 1.0)}

    digest = sound.report.digest
    assert rules(sound, executed=executed(1.25, digest)) == []
    assert rules(sound, executed=executed(1.26, digest)) == ["bank conflicts"]
    assert rules(sound, executed=executed(16.0, "other code")) == []


def test_budgets_have_slack_but_for_local_memory():
    sound = row()
    budget = stored.numbers(sound)
    assert rules(sound, budgets={sound.key: budget}) == []
    for name, number in budget.items():
        assert rules(sound, budgets={sound.key: budget | {name: int(number * 0.9)}}) == ["budget"]
    assert rules(sound, budgets={sound.key: budget | {"registers": 127}}) == []
    assert rules(sound, budgets={sound.key: budget | {"lds": budget["lds"] - 1}}) == ["budget"]
    assert rules(sound, budgets={}) == ["budget"]


def test_every_exception_says_why_and_names_a_rule():
    for each in stored.exceptions():
        assert each.rule in (*gate.RULES, "bank conflicts")
        assert len(each.why) > 20


def test_stored_files_are_read_as_written(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    stored.write_budgets([row()], "3.9.0")
    assert stored.budgets() == stored.Budgets("3.9.0", {row().key: stored.numbers(row())})
    counted = {row().key: Executed(row().report.digest, 1.0, 2.0)}
    stored.write_executed(counted)
    assert stored.executed() == counted


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
def test_layers_reach_every_shipped_config(arch):
    pytest.importorskip("triton", minversion="3.4")
    reached = []
    pick = tuning.pick

    def picked(*arguments):
        reached.append(id(pick(*arguments)))
        return pick(*arguments)

    with mock.patch.object(tuning, "pick", picked):
        launches = [launch for layer in layers.every() for launch in layers.launches(layer, arch)]
    assert launches
    for kernel in tuning.PARAMETERS:
        for rows in tuning.table(kernel, arch)[1].values():
            for each in rows:
                # Up to that many tokens run on bdmv, as long as path "triton" asks for it first.
                if kernel != "bdmm" or each["max"].get("tokens", dispatch.FEW + 1) > dispatch.FEW:
                    assert id(each) in reached, (kernel, each)


def test_own_configs_are_not_judged(tmp_path, monkeypatch):
    pytest.importorskip("triton", minversion="3.4")
    monkeypatch.setenv("MONARCH_ROCM_CACHE_DIR", str(tmp_path))
    file = tmp_path / "gfx942" / "bdmm.json"
    file.parent.mkdir()
    config = {"BT": 16, "BO": 16, "BI": 16, "num_warps": 1, "num_stages": 1}
    rows = [{"max": {}, "config": config, "wins": True}]
    file.write_text(json.dumps({"2": rows, "4": rows}))
    first, *_ = layers.launches(layers.Layer(4096, 4096, 4, 8192), "gfx942")
    assert first.constants["BT"] > 16


def test_an_unknown_architecture_is_refused_with_those_that_fit(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["codegen", "--arch", "gfx942", "gfx1100"])
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert all(arch in error for arch in ("gfx1100", "gfx90a", "gfx942", "gfx950"))


def test_budgets_are_written_of_everything_or_nothing(capsys):
    for some in (["--arch", "gfx942"], ["--all"]):
        with pytest.raises(SystemExit):
            cli.main(["codegen", "--write-budgets", *some])
        assert "default layers on all architectures" in capsys.readouterr().err


def test_without_triton_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(dispatch, "triton_state", lambda: ("not installed", "Triton is not installed"))
    assert cli.main(["codegen"]) == 1
    assert "Triton is not installed" in capsys.readouterr().err


def test_a_launch_that_does_not_compile_is_named(capsys, monkeypatch):
    pytest.importorskip("triton", minversion="3.4")
    layer = layers.Layer(4096, 4096, 4, 8192)
    first, *_ = layers.launches(layer, "gfx942")
    monkeypatch.setattr(compiling, "compile_launch", mock.Mock(side_effect=ValueError("too wide")))
    with pytest.raises(RuntimeError, match=r"bdmm, forward 1 of 4096>4096 .* gfx942 .*: too wide"):
        compiling.compile_row(layer, first, "gfx942")
    monkeypatch.setattr(command, "compile_layers", mock.Mock(side_effect=RuntimeError("no such thing")))
    assert cli.main(["codegen"]) == 1
    assert "no such thing" in capsys.readouterr().err


COMPILE = """
import json, sys
from dataclasses import replace
from monarch_rocm.codegen import compiling, gate, layers

arch, changes = sys.argv[1], json.loads(sys.argv[2])
layer = layers.Layer(4096, 4096, 4, 8192)
launch = layers.launches(layer, arch)[0]
launch = replace(launch, constants=launch.constants | changes)
row = compiling.compile_row(layer, launch, arch)
print(json.dumps([failure.rule for failure in gate.judge([row], [], {}, None)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "changes", "rule"),
    [
        ("gfx942", {}, None),
        ("gfx950", {"BT": 128, "BO": 128, "BI": 64, "num_warps": 4, "waves_per_eu": 4}, "vector spills"),
        ("gfx942", {"BT": 128, "BO": 128, "BI": 128, "num_stages": 3}, "local memory"),
    ],
)
def test_the_gate_sees_what_a_bad_config_does(arch, changes, rule):
    pytest.importorskip("triton", minversion="3.4")
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, arch, json.dumps(changes)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    broken = json.loads(done.stdout)
    assert rule in broken if rule else broken == []


@pytest.mark.slow
def test_shipped_kernels_pass(tmp_path, capsys):
    pytest.importorskip("triton", minversion="3.4")
    file = tmp_path / "rows.json"
    status = cli.main(["codegen", "--arch", "gfx90a", "gfx942", "gfx950", "--json", str(file)])
    out = capsys.readouterr().out
    assert status == 0, out[-3000:]
    header = next(line for line in out.splitlines() if "VGPR" in line)
    for name in ("arch", "kernel", "layer", "dtype", "AGPR", "SGPR", "spills", "LDS", "waves", "MFMA"):
        assert name in header.split()
    assert "no AMD GPU was involved" in out

    rows = json.loads(file.read_text())["rows"]
    assert {each["arch"] for each in rows} == {"gfx90a", "gfx942", "gfx950"}
    assert {each["kernel"] for each in rows} == set(tuning.PARAMETERS)
    for each in rows:
        no_product = each["kernel"] == "interleave" or each["constants"].get("BT") == 1
        assert (not each["report"]["mfma"]) == no_product, each["key"]
