"""Config tables: every shipped one is sound, lookups are pure, and a bad file of the user's is ignored."""

import json
import warnings

import pytest
import torch

from monarch_rocm.kernels import tuning

FILES = sorted(tuning.CONFIGS.glob("*/*.json"))
CONFIG = {"BT": 64, "BO": 16, "BI": 16, "num_warps": 4, "num_stages": 1}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh():
    def clear():
        tuning.table.cache_clear()
        tuning._lookup.cache_clear()

    clear()
    yield
    clear()


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_shipped_tables_are_whole_and_fit_local_memory(file):
    """Operand tiles of all stages within the 64 KB of LDS that gfx90a and gfx942 have."""
    rows = tuning._read(file, file.stem)
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
    assert tuning.table("bdmm", "default")[0] == file
    assert tuning.lookup("bdmm", CPU, torch.float32, 8, 8, 8) == last


def table(**changes):
    row = {"max": {}, "config": CONFIG | changes, "wins": True}
    return json.dumps({"2": [row], "4": [row]})


@pytest.mark.parametrize(
    "text",
    [
        '{"2": [',
        "[]",
        "{}",
        '{"2": [], "4": []}',
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
    ],
)
def test_broken_or_foreign_table_is_ignored_with_one_warning(tmp_path, monkeypatch, text):
    monkeypatch.setenv("MONARCH_ROCM_CACHE_DIR", str(tmp_path))
    own_table(tmp_path, text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (8, 80, 8):
            assert tuning.lookup("bdmm", CPU, torch.float32, size, 8, 8)["config"]["BT"] >= 16
    assert ["is ignored" in str(warning.message) for warning in caught] == [True]
