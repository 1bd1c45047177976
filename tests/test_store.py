"""The user's own tables, written: merged, replaced whole, by many processes at once."""

import json
import subprocess
import sys

import pytest
import torch

from monarch_rocm.kernels import store, tuning

CONFIG = {"BT": 64, "BO": 16, "BI": 16, "num_warps": 4, "num_stages": 1}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MONARCH_ROCM_CACHE_DIR", str(tmp_path))
    tuning.refresh()
    tuning._ignored.clear()
    yield tmp_path / "default"
    tuning.refresh()


def row(tokens, **changes):
    return {"at": {"out": 64, "in": 32, "tokens": tokens}, "config": CONFIG | changes, "wins": True}


def test_a_row_is_seen_at_once_and_replaces_only_its_own_shape(folder):
    assert tuning.lookup("bdmm", CPU, torch.float32, 64, 32, 128)["config"] != CONFIG
    file = store.save("bdmm", "default", 4, row(128))
    assert file == folder / "bdmm.json"
    assert tuning.lookup("bdmm", CPU, torch.float32, 64, 32, 128) == row(128)
    store.save("bdmm", "default", 4, row(16))
    store.save("bdmm", "default", 2, row(128))
    store.save("bdmm", "default", 4, row(128, num_warps=1))
    assert json.loads(file.read_text()) == {"2": [row(128)], "4": [row(16), row(128, num_warps=1)]}


def test_rows_for_ranges_are_kept_behind_measured_ones(folder):
    anything = {"max": {}, "config": CONFIG | {"num_warps": 8}, "wins": False}
    folder.mkdir()
    (folder / "bdmm.json").write_text(json.dumps({"2": [], "4": [anything]}))
    store.save("bdmm", "default", 4, row(128))
    assert tuning.read(folder / "bdmm.json", "bdmm")["4"] == [row(128), anything]
    assert tuning.lookup("bdmm", CPU, torch.float32, 64, 32, 128) == row(128)
    assert tuning.lookup("bdmm", CPU, torch.float32, 64, 32, 256) == anything


@pytest.mark.parametrize("text", ['{"2": [', '{"loss": [0.5]}', "\x00\xff"])
def test_a_broken_file_is_replaced(folder, text):
    folder.mkdir()
    (folder / "bdmm.json").write_text(text)
    with pytest.warns(UserWarning, match="is ignored"):
        tuning.lookup("bdmm", CPU, torch.float32, 64, 32, 128)
    store.save("bdmm", "default", 4, row(128))
    assert tuning.lookup("bdmm", CPU, torch.float32, 64, 32, 128) == row(128)


def test_what_is_no_row_is_not_written(folder):
    with pytest.raises(ValueError, match="BT must be a power of two"):
        store.save("bdmm", "default", 4, row(128, BT=24))
    assert not folder.exists()


WRITE = """
import os
from monarch_rocm.kernels import store, tuning

config = {"BT": 64, "BO": 16, "BI": 16, "num_warps": 4, "num_stages": 1}

def write(process):
    for i in range(8):
        at = {"out": 1 + process, "in": 1 + i, "tokens": 1}
        store.save("bdmm", "default", 4, {"at": at, "config": config, "wins": True})
        tuning.read(tuning.own_file("bdmm", "default"), "bdmm")  # never half written

children = []
for process in range(8):
    children.append(os.fork())
    if not children[-1]:
        try:
            write(process)
            os._exit(0)
        finally:
            os._exit(1)
print([os.waitpid(child, 0)[1] for child in children])
"""


def test_eight_processes_write_at_once_and_no_row_is_lost(folder):
    done = subprocess.run([sys.executable, "-c", WRITE], capture_output=True, text=True, check=False)
    assert done.stdout == f"{[0] * 8}\n", done.stderr
    rows = tuning.read(folder / "bdmm.json", "bdmm")["4"]
    assert len(rows) == 64
    assert {(each["at"]["out"], each["at"]["in"]) for each in rows} == {
        (1 + process, 1 + i) for process in range(8) for i in range(8)
    }
