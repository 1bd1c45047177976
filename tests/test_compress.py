"""`monarch-rocm compress`: a folder in, a smaller one out, resumed where it was stopped."""

import json

import pytest
import torch

from monarch_rocm import cli, compress, heal
from monarch_rocm.integrations.transformers import register

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore:a Monarch layer")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]


@pytest.fixture(params=["BertModel", "GPT2LMHeadModel"])
def folder(request, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    if request.param == "BertModel":
        config = transformers.BertConfig(
            vocab_size=31, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    else:
        config = transformers.GPT2Config(vocab_size=31, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    made = tmp_path / "dense"
    getattr(transformers, request.param)(config).save_pretrained(made)
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(made)
    (tmp_path / "texts.txt").write_text("a b c d\n\ne f g h i\nj k\n" * 20)
    return made


def run(folder, *more, budget="0.8", out="out"):
    place = folder.parent
    texts = ["--calibration", str(place / "texts.txt"), "--out", str(place / out), "--device", "cpu"]
    return cli.main(["compress", str(folder), "--budget", budget, *texts, "--batch", "8", *more])


def test_a_folder_becomes_a_smaller_one_that_loads(folder, capsys):
    assert run(folder, "--heal", "3") == 0
    out = folder.parent / "out"
    kind = getattr(transformers, json.loads((out / "config.json").read_text())["architectures"][0])
    register()
    model = kind.from_pretrained(out)
    sizes = [sum(p.numel() for p in each.parameters()) for each in (kind.from_pretrained(folder), model)]
    assert sizes[1] <= 0.8 * sizes[0]
    assert not (out / compress.WORK).exists()
    assert "layers replaced" in (out / "report.txt").read_text()
    assert f".from_pretrained({str(out)!r})" in (out / "README.md").read_text()
    transformers.AutoTokenizer.from_pretrained(out)
    said = capsys.readouterr()
    assert f"{sizes[1]:,}" in said.err
    assert run(folder) == 2
    assert "holds a model already" in capsys.readouterr().err


def test_a_run_out_of_memory_says_so_and_is_resumed(folder, monkeypatch, capsys):
    fitted = []
    real = compress.monarchize
    monkeypatch.setattr(compress, "monarchize", lambda *a, **k: fitted.append(1) or real(*a, **k))

    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(compress, "heal", fails)
    assert run(folder, "--heal", "2") == 1
    said = capsys.readouterr().err
    assert "out of memory while healing" in said
    assert "--batch below 8" in said
    assert run(folder, "--heal", "2", budget="0.85") == 2
    assert "is of a run with" in capsys.readouterr().err
    monkeypatch.setattr(compress, "heal", heal)
    assert run(folder, "--heal", "2", "--batch", "4") == 0
    assert fitted == [1]


def test_a_sentence_encoder_keeps_its_pooling_and_is_fitted_to_it(folder, monkeypatch):
    if "Bert" not in (folder / "config.json").read_text():
        pytest.skip("no encoder")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "modules.json").write_text("[]")
    seen = []
    real = compress.monarchize
    monkeypatch.setattr(compress, "monarchize", lambda *a, **k: seen.append(k["readout"]) or real(*a, **k))
    assert run(folder) == 0
    assert seen[0] is not None
    assert (folder.parent / "out" / "1_Pooling" / "config.json").exists()
    assert (folder.parent / "out" / "modules.json").exists()


@pytest.mark.parametrize("folder", ["BertModel"], indirect=True)
def test_bad_input_says_what_was_given(folder, capsys):
    def said(*more, **kwargs):
        assert run(*more, **kwargs) == 2
        return capsys.readouterr().err

    place = folder.parent
    assert "is no folder" in said(place / "nothing")
    (place / "empty").mkdir()
    assert "has no config.json" in said(place / "empty")
    assert "between 0 and 1" in said(folder, budget="1.5")
    assert "out of reach" in said(folder, budget="0.01")
    assert "own folder" in said(folder, out="dense")
    assert run(folder, out="small") == 0
    assert "compressed already" in said(place / "small", out="again")
    texts = (place / "texts.txt").read_text()
    (place / "texts.txt").write_text(" \n\n")
    assert "has no text" in said(folder)
    (place / "texts.txt").write_bytes(b"\xff\xfe\xff")
    assert "not UTF-8" in said(folder)
    (place / "texts.txt").unlink()
    assert "cannot read --calibration" in said(folder)
    (place / "texts.txt").write_text(texts)
    with pytest.raises(SystemExit):
        run(folder, "--batch", "0")
    assert "no fewer than 0 steps" in said(folder, "--heal", "-1")
    assert "rate above 0" in said(folder, "--lr", "-1")
    assert "--device foo cannot be used" in said(folder, "--device", "foo")
    assert "cannot write to --out" in said(folder, out="texts.txt")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-8])
    assert "cut or damaged" in said(folder)
    kept = safetensors.load(weights)
    lost = next(name for name, tensor in kept.items() if tensor.ndim > 1)
    del kept[lost]
    safetensors.save_file(kept, folder / "model.safetensors", {"format": "pt"})
    assert "lack 1 of the model's" in said(folder)
    (folder / "model.safetensors").write_bytes(weights)
    for name in ("tokenizer.json", "vocab.txt"):
        (folder / name).unlink(missing_ok=True)
    assert "knows 0 of" in said(folder)
    (folder / "config.json").write_text("{")
    assert "cannot load" in said(folder)


@pytest.mark.parametrize("folder", ["BertModel"], indirect=True)
def test_a_head_that_was_never_saved_is_left_out(folder, capsys):
    """Sentence encoders name the model that they were trained from in their configs."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    assert run(folder) == 0
    made = json.loads((folder.parent / "out" / "config.json").read_text())
    assert made["architectures"] == ["BertModel"]
    assert "60 texts are few" in capsys.readouterr().err


def test_a_model_without_linear_layers_is_refused(folder, monkeypatch, capsys):
    real = compress._load

    def embedding_only(folder):
        class Bag(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = torch.nn.Embedding(31, 8)

            def forward(self, input_ids, **kwargs):
                return self.embed(input_ids)

        return Bag(), real(folder)[1]

    monkeypatch.setattr(compress, "_load", embedding_only)
    assert run(folder) == 2
    assert "no linear layers" in capsys.readouterr().err
