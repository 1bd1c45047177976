"""The search space: every config of it can be launched, and a bad entry is named."""

import json

import pytest

from monarch_rocm.kernels import space, tuning
from monarch_rocm.launches import KERNELS


@pytest.fixture(autouse=True)
def fresh():
    space.candidates.cache_clear()
    yield
    space.candidates.cache_clear()


@pytest.mark.parametrize("rocm", [False, True])
@pytest.mark.parametrize("kernel", tuning.PARAMETERS)
def test_every_kernel_has_candidates_each_once(kernel, rocm):
    found = space.candidates(kernel, rocm)
    assert 8 < len(found) <= 600
    assert len({tuple(sorted(config.items())) for config in found}) == len(found)
    for config in found:
        tuning.check_config(config, kernel)


def test_tune_knows_every_kernel_that_has_a_table():
    assert set(KERNELS) == set(tuning.PARAMETERS)


def test_amd_options_are_for_rocm_only(monkeypatch, tmp_path):
    assert not any(tuning.AMD_OPTIONS & set(c) for k in KERNELS for c in space.candidates(k, False))
    assert any(tuning.AMD_OPTIONS & set(config) for config in space.candidates("bdmm", True))
    entry = {"configs": [{**ONE, "waves_per_eu": [2]}], "rocm": {}, "knobs": []}
    write(monkeypatch, tmp_path, {"fused": entry})
    with pytest.raises(ValueError, match="belong under rocm"):
        space.candidates("fused", False)


ONE = {"BT": [16, 32], "num_warps": [4], "num_stages": [1]}


def write(monkeypatch, folder, entries):
    file = folder / "space.json"
    file.write_text(json.dumps(entries))
    monkeypatch.setattr(space, "SPACE", file)
    space.candidates.cache_clear()


def test_rocm_replaces_values_and_adds_options(monkeypatch, tmp_path):
    rocm = {"num_stages": [2], "waves_per_eu": [0, 2]}
    write(monkeypatch, tmp_path, {"fused": {"configs": [ONE], "rocm": rocm, "knobs": []}})
    assert [c["BT"] for c in space.candidates("fused", False)] == [16, 32]
    assert space.candidates("fused", True)[-1] == {
        "BT": 32,
        "num_warps": 4,
        "num_stages": 2,
        "waves_per_eu": 2,
    }
    assert len(space.candidates("fused", True)) == 4


def test_options_are_tried_about_a_config(monkeypatch, tmp_path):
    """All other values of a round, Triton's defaults left unsaid, and no `kpack` where there is none."""
    knobs = [{"matrix_instr_nonkdim": [16, 32], "kpack": [1, 2]}, {"waves_per_eu": [0, 2]}]
    write(monkeypatch, tmp_path, {"fused": {"configs": [ONE], "rocm": {}, "knobs": knobs}})
    plain = {"BT": 16, "num_warps": 4, "num_stages": 1, "matrix_instr_nonkdim": 16}
    assert space.rounds("fused") == 2
    assert space.variants("fused", 0, plain, "gfx942") == [
        plain | {"kpack": 2},
        plain | {"matrix_instr_nonkdim": 32},
        plain | {"matrix_instr_nonkdim": 32, "kpack": 2},
    ]
    assert space.variants("fused", 0, plain, "gfx950") == [plain | {"matrix_instr_nonkdim": 32}]
    assert space.variants("fused", 1, plain, "gfx942") == [plain | {"waves_per_eu": 2}]


@pytest.mark.parametrize("kernel", tuning.PARAMETERS)
def test_every_round_of_options_suits_every_config(kernel):
    for number in range(space.rounds(kernel)):
        for config in space.candidates(kernel, True)[:3]:
            assert space.variants(kernel, number, config, "gfx942")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({}, "no entry for the kernel 'fused'"),
        ({"fused": []}, "the entry of fused must be"),
        ({"fused": {"configs": [ONE]}}, "the entry of fused must be"),
        ({"fused": {"configs": [ONE], "rocm": {}}}, "the entry of fused must be"),
        ({"fused": {"configs": [{**ONE, "BT": [24]}], "rocm": {}, "knobs": []}}, "BT must be a power of two"),
        ({"fused": {"configs": [{"BT": [16]}], "rocm": {}, "knobs": []}}, "num_warps"),
    ],
)
def test_bad_entries_are_named(monkeypatch, tmp_path, entries, said):
    write(monkeypatch, tmp_path, entries)
    with pytest.raises((LookupError, ValueError), match=said):
        space.candidates("fused", False)
