"""Config tables: every shipped one is sound, lookups are pure, and a bad file of the user's is ignored."""

import json
import warnings

import pytest
import torch

from monarch_rocm import MonarchShape, dispatch, plan
from monarch_rocm.kernels import tuning

FILES = sorted(tuning.CONFIGS.glob("*/*.json"))
CONFIG = {"BT": 64, "BO": 16, "BI": 16, "num_warps": 4, "num_stages": 1}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh():
    tuning.refresh()
    tuning._ignored.clear()
    yield
    tuning.refresh()


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_shipped_tables_are_whole_and_fit_local_memory(file):
    """Operand tiles of all stages within the 64 KB of LDS that gfx90a and gfx942 have."""
    rows = tuning.read(file, file.stem)
    assert tuning.table(file.stem, file.parent.name) == (file, rows)
    for itemsize in (2, 4):
        for row in rows[str(itemsize)]:
            config = row["config"]
            if file.stem in ("bdmm", "bdmm_wgrad"):
                inner = "BI" if file.stem == "bdmm" else "BT"
                outer = sum(config[name] for name in ("BT", "BO", "BI") if name != inner)
                assert min(config[name] for name in ("BT", "BO", "BI")) >= 16
                if file.parent.name == "default":
                    assert outer * config[inner] * itemsize * config["num_stages"] <= 64 * 1024
            if file.stem == "interleave":
                assert config["BT"] * config["BR"] * config["BC"] * itemsize <= 64 * 1024


def test_architectures_without_a_table_take_the_default():
    assert tuning.table("bdmm", "gfx1100")[0] == tuning.CONFIGS / "default" / "bdmm.json"
    assert tuning.table("bdmm", "sm90")[0] == tuning.CONFIGS / "sm90" / "bdmm.json"


def test_tokens_count_by_bucket():
    found = {str(tuning.lookup("bdmm", CPU, torch.float32, 64, 64, tokens)) for tokens in range(1025, 2049)}
    assert len(found) == 1
    assert tuning._lookup.cache_info().currsize == 1
    tuning._lookup("bdmm", "default", 4, 64, 64, tuning.bucket_of(1025))
    assert tuning._lookup.cache_info().currsize == 1
    assert [tuning.bucket_of(tokens) for tokens in (0, 1, 2, 3, 4, 5)] == [1, 1, 2, 4, 4, 8]


def own_table(folder, text):
    file = folder / "default" / "bdmm.json"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return file


def test_own_table_goes_first(tmp_path, monkeypatch):
    monkeypatch.setenv("MONARCH_ROCM_CACHE_DIR", str(tmp_path))
    last = {"max": {}, "config": CONFIG, "wins": False}
    rows = {"2": [last | {"config": CONFIG | {"BT": 32}}], "4": [last]}
    file = own_table(tmp_path, json.dumps(rows))
    found = tuning.lookup("bdmm", CPU, torch.float32, 8, 8, 8)
    assert found == last
    assert tuning.file_of("bdmm", "default", found["config"]) == file


AT = {"out": 64, "in": 32, "tokens": 128}


def test_tuned_row_serves_its_shape_and_bucket_and_nothing_else(tmp_path, monkeypatch):
    """All else falls through to the shipped table, of which the user's file is no replacement."""
    monkeypatch.setenv("MONARCH_ROCM_CACHE_DIR", str(tmp_path))
    tuned = {"at": AT, "config": CONFIG | {"num_warps": 1}, "wins": True}
    file = own_table(tmp_path, json.dumps({"2": [], "4": [tuned]}))
    shipped = tuning.CONFIGS / "default" / "bdmm.json"

    def source(dtype, *sizes):
        return tuning.file_of("bdmm", "default", tuning.lookup("bdmm", CPU, dtype, *sizes)["config"])

    assert tuning.lookup("bdmm", CPU, torch.float32, 64, 32, 100) == tuned
    assert [source(torch.float32, 64, 32, tokens) for tokens in (65, 128)] == [file, file]
    others = [(64, 32, 64), (64, 32, 129), (63, 32, 128), (64, 16, 128), (32, 64, 128), (1, 1, 1)]
    assert {source(torch.float32, *sizes) for sizes in others} == {shipped}
    assert source(torch.float16, 64, 32, 128) == shipped
    assert tuning.exact("bdmm", "default", 4, 64, 32, 128) == tuned
    assert tuning.exact("bdmm", "default", 4, 64, 32, 64) is None
    assert tuning.exact("bdmm", "gfx942", 4, 64, 32, 128) is None


def test_plan_names_the_file_of_each_config(tmp_path, monkeypatch):
    """One launch of a layer may be the user's and the next one shipped."""
    pytest.importorskip("triton", minversion="3.4")
    monkeypatch.setenv("MONARCH_ROCM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(dispatch, "why_not_triton", lambda *args: None)
    dispatch._choose.cache_clear()
    shape = MonarchShape(64, 96, 2)
    _, n_out, n_in = shape.factor2
    row = {"at": {"out": n_out, "in": n_in, "tokens": 64}, "config": CONFIG, "wins": True}
    file = own_table(tmp_path, json.dumps({"2": [], "4": [row]}))
    first, second, _ = plan(shape, 64, torch.float32, "cpu", backend="triton").kernels
    assert first["file"] == tuning.CONFIGS / "default" / "bdmm.json"
    assert second["file"] == file
    dispatch._choose.cache_clear()


def test_files_are_read_again_only_after_a_refresh(tmp_path, monkeypatch):
    monkeypatch.setenv("MONARCH_ROCM_CACHE_DIR", str(tmp_path))
    before = tuning.lookup("bdmm", CPU, torch.float32, 64, 32, 128)
    tuned = {"at": AT, "config": CONFIG | {"num_warps": 1}, "wins": True}
    own_table(tmp_path, json.dumps({"2": [], "4": [tuned]}))
    assert tuning.lookup("bdmm", CPU, torch.float32, 64, 32, 128) is before
    tuning.refresh()
    assert tuning.lookup("bdmm", CPU, torch.float32, 64, 32, 128) == tuned


def test_auto_can_do_without_a_kernel_for_a_while(tmp_path, monkeypatch):
    monkeypatch.setenv("MONARCH_ROCM_CACHE_DIR", str(tmp_path))
    tuned = {"at": AT, "config": CONFIG, "wins": True}
    own_table(tmp_path, json.dumps({"2": [], "4": [tuned]}))

    def wins():
        return tuning.lookup("bdmm", CPU, torch.float32, 64, 32, 128)["wins"]

    assert wins()
    with tuning.without("bdmm"):
        assert not wins()
    assert wins()


def table(**changes):
    row = {"max": {}, "config": CONFIG | changes, "wins": True}
    return json.dumps({"2": [row], "4": [row]})


def served(**by):
    return json.dumps({"2": [], "4": [{"config": CONFIG, "wins": True, **by}]})


@pytest.mark.parametrize(
    "text",
    [
        '{"2": [',
        "[]",
        "{}",
        "[" * 100_000,
        '{"2": []}',
        '{"2": 3, "4": 4}',
        '{"2": [{"max": {}}], "4": []}',
        '{"2": [{"max": 1, "config": {}, "wins": true}], "4": [{"max": {}, "config": {}, "wins": true}]}',
        '{"2": [{"max": {}, "config": {}, "wins": true}], "4": [{"max": {}, "config": {}, "wins": true}]}',
        table(BI=24),
        table(BT=0),
        table(BO=8),
        table(BT="64"),
        table(num_stages=0),
        table(PROGRAMS=4),
        served(),
        served(at=AT, max={}),
        served(at={"out": 64, "in": 32}),
        served(at={**AT, "tokens": "128"}),
        served(max={"width": 3}),
    ],
)
def test_broken_or_foreign_table_is_ignored_with_one_warning(tmp_path, monkeypatch, text):
    monkeypatch.setenv("MONARCH_ROCM_CACHE_DIR", str(tmp_path))
    own_table(tmp_path, text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (8, 80, 8):
            assert tuning.lookup("bdmm", CPU, torch.float32, size, 8, 8)["config"]["BT"] >= 16
        tuning.refresh()
        assert tuning.lookup("bdmm", CPU, torch.float32, 8, 8, 8)
    ours = [warning for warning in caught if warning.category is UserWarning]  # not of what others left open
    assert ["is ignored" in str(warning.message) for warning in ours] == [True]


def test_a_row_of_bdmv_must_take_all_its_tokens_at_once():
    config = {"BT": 4, "BO": 16, "BI": 16, "num_warps": 1, "num_stages": 1}
    tuning.check_row({"max": {"tokens": 4}, "config": config, "wins": True}, "bdmv")
    for limits in ({"tokens": 8}, {}):
        with pytest.raises(ValueError, match="BT of as many"):
            tuning.check_row({"max": limits, "config": config, "wins": True}, "bdmv")
