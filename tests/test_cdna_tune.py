"""The offline tuner for CDNA: that its model behaves, and that what spills is never chosen."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.4")
from cdna_tune import classes, compiled, model, options, ptx, search, validate, whole
from cdna_tune.model import Part, Work

from monarch_rocm.codegen import assembly
from monarch_rocm.kernels import space, tuning

ROOT = Path(__file__).parent.parent
ARCHS = ("gfx90a", "gfx942", "gfx950")
ON = model.chip("gfx942")
MFMA = "v_mfma_f32_32x32x8_bf16"


def part(mfma=0, valu=0, loads=0, width=16, lds=0):
    counts = {"mfma": mfma, "valu": valu, "load": loads, "lds read": lds}
    products = {MFMA: mfma} if mfma else {}
    return Part(counts, products, {width: loads} if loads else {}, {}, {width: lds} if lds else {})


def work(**changes):
    plain = Work(
        programs=3040,
        warps=4,
        resident=2,
        once=part(valu=100),
        loop=part(mfma=16, valu=20, loads=4, lds=16),
        iterations=16,
        stages=1,
        itemsize=2,
        bytes=10**6,
    )
    return replace(plain, **changes)


def test_matrix_clocks_are_amds():
    # AMD's ISA documents: 16 passes of 4 clocks on MI200, 8 on MI300; 32x32x2 of float32 takes 16.
    for arch, name, itemsize, clocks in (
        ("gfx90a", "v_mfma_f32_32x32x8bf16_1k", 2, 64),
        ("gfx942", MFMA, 2, 32),
        ("gfx942", "v_mfma_f32_16x16x16_bf16", 2, 16),
        ("gfx950", "v_mfma_f32_32x32x16_bf16", 2, 32),
        ("gfx942", "v_mfma_f32_32x32x2_f32", 4, 64),
    ):
        assert model.matrix_clocks(name, 1, model.chip(arch), itemsize) == clocks
    with pytest.raises(ValueError, match="what shape"):
        model.matrix_clocks("v_mfma", 1, ON, 2)


def test_rates_are_the_published_peaks():
    for arch, itemsize, peak in (
        ("gfx942", "2", 1307e12),
        ("gfx942", "4", 163.4e12),
        ("gfx950", "2", 2517e12),
    ):
        on = model.chip(arch)
        assert on.units * on.clock * on.flops[itemsize] == pytest.approx(peak, rel=0.01)


def test_a_kernel_of_products_alone_reaches_the_peak():
    on = replace(ON, launch=0.0)
    heavy = work(once=part(), loop=part(mfma=16), iterations=10**4, programs=304 * 8, resident=8, bytes=1)
    flops = 304 * 8 * 4 * 16 * 10**4 * 2 * 32 * 32 * 8
    ideal = flops / (on.units * on.clock * on.flops["2"]) * 1e6
    assert ideal <= model.time(on, heavy).us < 1.3 * ideal


def test_a_kernel_of_bytes_alone_takes_memorys_time():
    on = replace(ON, launch=0.0)
    light = work(programs=304, once=part(), loop=None, bytes=10**9)
    assert model.time(on, light).us == pytest.approx(10**9 / (on.memory * on.fraction) * 1e6, rel=0.01)


@pytest.mark.parametrize(
    "worse",
    [
        {"programs": 3041},  # a tail
        {"resident": 1},
        {"iterations": 17},
        {"once": part(valu=2000)},
        {"bytes": 10**9},
        {"lines": 50.0},
        {"conflicts": 16.0},
        {"loop": part(mfma=32, valu=20, loads=4, lds=16)},
        {"loop": part(mfma=16, valu=200, loads=4, lds=16)},
        {"loop": part(mfma=16, valu=20, loads=32, width=2, lds=16)},
    ],
)
def test_more_work_never_takes_less_time(worse):
    assert model.time(ON, work(**worse)).us > model.time(ON, work()).us


def test_a_stage_more_hides_latency():
    assert model.time(ON, work(stages=2)).latency < model.time(ON, work()).latency


def test_iterations_are_those_that_the_products_need():
    loop, code = part(mfma=4), compiled.Code(mfma=MFMA)
    peeled = part(mfma=6)  # two products stand outside of the loop
    assert search.iterations(code, peeled, loop, products=32, steps=99) == 7.5
    assert search.iterations(code, part(), part(), products=0, steps=5) == 5


def counts(mfma):
    return {"classes": {"mfma": mfma, "valu": 10, "load": 4}, "loads": {"16": 4}, "stores": {}, "lds": {}}


SOUND = compiled.Code(waves=2.0, mfma=MFMA, whole=counts(8), loop=counts(4))
EACH = classes.Class("bdmm", "bf16", None, None, 512, 512, (None,))


def ranked_with(codes):
    """A ranking where every candidate has one of the codes in turn."""
    configs = search.distinct(EACH)
    known = {}
    for i, config in enumerate(configs):
        for job in search.jobs_of("gfx942", EACH, config, classes.must_compile(EACH)):
            known[job] = codes[i % len(codes)]
    return search.ranking("gfx942", EACH, None, known), known


def test_what_spills_is_never_ranked():
    spilling = [
        replace(SOUND, vector_spills=1),
        replace(SOUND, scratch=4),
        replace(SOUND, failure="too much local memory"),
        replace(SOUND, waves=0.0),
    ]
    assert not ranked_with(spilling)[0]
    ranked, known = ranked_with([*spilling, SOUND])
    assert ranked
    for _, config in ranked:
        (job, *_) = search.jobs_of("gfx942", EACH, config, [(classes.ranked_by(EACH)[0], False)])
        assert known[job] is SOUND


def test_a_winner_that_spills_elsewhere_is_passed_over():
    ranked, known = ranked_with([SOUND])
    first = search.jobs_of("gfx942", EACH, ranked[0][1], classes.must_compile(EACH))
    second = search.jobs_of("gfx942", EACH, ranked[1][1], classes.must_compile(EACH))

    def winner():
        return search.winner("gfx942", EACH, ranked, lambda jobs: {job: known[job] for job in jobs})

    assert winner() == ranked[0]
    known[first[-1]] = replace(SOUND, vector_spills=1)
    known[second[-1]] = replace(SOUND, scalar_spills=1)
    assert winner() == ranked[2]
    for job, code in known.items():
        if not search.usable(code):
            continue
        known[job] = replace(SOUND, scalar_spills=1)
    assert winner() == ranked[1]  # scalar spills cost little: better than no config
    for job in known:
        known[job] = replace(SOUND, vector_spills=1)
    with pytest.raises(RuntimeError, match="without spills"):
        winner()


LOCAL = {"classes": {"mfma": 4, "lds read": 64}, "loads": {}, "stores": {}, "lds": {"16": 64}}


def row_with(present=None):
    """A row that is ranked by sound code alike for all, and where that code is looked up."""
    ranked, known = ranked_with([SOUND])
    codes = search.Codes("gfx942", 1)
    codes.known, codes.counted = dict(known), set(known)
    return search.Row(EACH, None, ranked, present), codes


def slower(codes, config, **changes):
    """Another code for a config, in every launch of it."""
    places = [(place, False) for place in classes.ranked_by(EACH)]
    for job in search.jobs_of("gfx942", EACH, config, places):
        codes.known[job] = replace(SOUND, **changes)


def test_a_present_config_stays_unless_another_is_clearly_better():
    row, codes = row_with()
    best, other = row.ranked[0][1], row.ranked[-1][1]
    us = codes.microseconds(row, other)
    row.present = other
    assert search.stays(row, us / (search.MARGIN - 0.01), codes)
    assert not search.stays(row, us / (search.MARGIN + 0.01), codes)
    for changes in ({"vector_spills": 1}, {"failure": "a race"}):  # whatever it once was
        slower(codes, other, **changes)
        assert not search.stays(row, us * 9, codes)
    found = search.record_of(row, codes)
    assert (found["config"], found["before"], found["us_before"]) == (best, other, None)


def test_conflicts_that_were_counted_reorder_the_first(monkeypatch):
    row, codes = row_with()
    first, second = (config for _, config in row.ranked[:2])
    places = search.ranking_jobs("gfx942", row, [first])
    codes.counted -= set(places)
    slower(codes, first, whole=LOCAL, loop=LOCAL)
    before = codes.microseconds(row, first)
    counted = compiled.Counted(conflicts=16.0)
    monkeypatch.setattr(search, "count_all", lambda jobs, _: [(job, counted) for job in jobs])
    codes.count(places)
    assert codes.microseconds(row, first) > before
    search.reorder(row, codes)
    assert row.ranked[0][1] == second


def test_an_option_that_helps_competes_and_all_are_kept_for_the_record(monkeypatch):
    row, codes = row_with()
    base = row.ranked[0][1]
    others = space.variants("bdmm", 0, base, "gfx942")
    slower(codes, base, whole=LOCAL, loop=LOCAL)
    row.ranked = [(codes.microseconds(row, base), base)]

    def compile_all(jobs, _):
        for job in jobs:
            helped = dict(job.config).get("kpack") == 2
            yield job, SOUND if helped else replace(SOUND, whole=LOCAL, loop=LOCAL)

    monkeypatch.setattr(search, "compile_all", compile_all)
    monkeypatch.setattr(search, "count_all", lambda jobs, _: [(job, compiled.Counted()) for job in jobs])
    search.turn_knobs([row], codes, 0)
    assert [each["options"] for each in row.knobs] == [
        {name: value for name, value in config.items() if base.get(name) != value} for config in others
    ]
    assert row.ranked[0][1].get("kpack") == 2
    assert {True, False} == {each["over"] < 1 for each in row.knobs}


def test_a_whole_layers_program_is_counted_by_the_tile():
    stand = {"classes": {}, "loads": {"16": 3, "4": 1}, "stores": {"8": 2}, "lds": {"16": 1}}
    code = compiled.Code(mfma=MFMA, whole=stand, waves=2.0)
    ran = {"mfma": 64.0, "vector": 200.0, "load": 16.0, "store": 8.0, "lds_read": 8.0, "lds_write": 4.0}
    counted = compiled.Counted(instructions=ran)
    found = whole.part(code, counted, 2)
    assert (found.mfma, found.loads, found.stores) == ({MFMA: 32}, {16: 6, 4: 2}, {8: 4})
    assert (found.lds, found.classes["valu"], found.instructions) == ({16: 6}, 100, 150)
    config = {"BT": 64, "BO": 64, "BI": 64, "PROGRAMS": 64, "num_warps": 4, "num_stages": 1}
    launch = whole.work("chained", "bf16", config, code, counted, 2)
    # 16 blocks of 64 in either stage are 32 steps a tile; 64 programs take two tiles each.
    assert (launch.programs, launch.iterations, launch.loop.mfma) == (64, 64, {MFMA: 1})


def test_a_ranking_repeats():
    assert ranked_with([SOUND])[0] == ranked_with([SOUND])[0]


def test_rows_that_the_next_one_serves_are_left_out():
    def row(limits, tile):
        return {"max": limits, "config": {"BT": tile}, "wins": False}

    rows = [
        row({"out": 16, "tokens": 64}, 1),
        row({"out": 16, "tokens": 1024}, 2),
        row({"out": 16}, 2),
        row({"tokens": 64}, 3),
        row({}, 3),
    ]
    assert search.tidy(rows) == [rows[0], rows[2], rows[4]]
    # The next row does not serve what this one serves.
    assert search.tidy([row({"out": 16}, 1), row({"in": 16}, 1), row({}, 2)]) == [
        row({"out": 16}, 1),
        row({"in": 16}, 1),
        row({}, 2),
    ]


def test_every_class_has_candidates_and_launches():
    for each in classes.classes():
        assert search.distinct(each), each
        for (layer, place), hard in classes.must_compile(each):
            config = tuple(search.distinct(each)[0].items())
            launch = compiled.launch_of(compiled.Job("gfx942", layer, place, config, hard))
            assert launch.kernel.__name__ == f"{each.kernel}_kernel"
            sizes = [launch.constants.get(name, 0) for name in ("N_OUT", "N_IN")]
            if each.kernel in ("bdmm", "bdmm_wgrad"):
                assert sizes in ([each.n_out, each.n_in], [each.n_out - 1, each.n_in - 1])


@pytest.mark.parametrize("arch", ARCHS)
def test_the_shipped_tables_are_what_the_tuner_found(arch):
    found = json.loads((ROOT / "benchmarks" / "results" / "cdna_tune.json").read_text())[arch]
    for kernel, rows in search.tables(found).items():
        file, table = tuning.table(kernel, arch)
        assert file.parent.name == arch
        assert table == rows
        assert file.read_text() == search.dump(rows)


def test_chips_are_those_that_code_is_made_for():
    for arch in assembly.LDS:
        assert model.chip(arch).lanes == 64
        assert "remembered" in model.chip(arch).source or "rocm.docs" in model.chip(arch).source


def test_correlation_of_ranks():
    assert validate.spearman([1, 2, 3], [10, 20, 90]) == pytest.approx(1)
    assert validate.spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert validate.spearman([1, 1, 2], [5, 5, 7]) == pytest.approx(1)
    assert validate.spearman([1, 2, 3], [4, 4, 4]) == 0


def test_ptx_is_counted():
    ptx_text = """
.visible .entry kernel(
	ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
$L__BB0_2:
	cp.async.cg.shared.global [ %r16 + 0 ], [ %rd5 + 0 ], 0x10, %r17;
	wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, %p1;
	add.s32 %r1, %r2, %r3;
	@%p2 bra $L__BB0_2;
	ret;
"""
    whole, loop, shape = ptx.read(ptx_text)
    assert shape == "16x128x16"  # of each of the four warps
    assert loop == {
        "classes": {"load": 1, "mfma": 1, "valu": 1}, "loads": {16: 1}, "stores": {}, "lds": {16: 1}
    }  # fmt: skip
    assert whole["loads"] == {16: 2}


def test_documents_say_what_the_results_say():
    page = (ROOT / "docs" / "amd.md").read_text()
    results = ROOT / "benchmarks" / "results"
    rows = json.loads((results / "cdna_modelled.json").read_text())["rows"]
    assert len(rows) == 10
    for row in rows:
        assert "| " + " | ".join(map(str, row.values())) + " |" in page
    assert options.table(json.loads((results / "cdna_tune.json").read_text())) in page
    found = json.loads((results / "model_h200.json").read_text())
    for kernel in ("bdmm", "bdmm_wgrad"):
        part = found[kernel]
        numbers = (
            f"| {part['median_spearman']}, {part['worst_spearman']} | {part['median_chosen_over_best']}, "
        )
        assert f"| `{kernel}` | {part['cases']} {numbers}" in page
    assert f"correlation is {found['spearman_over_all']}" in page
