"""Models of transformers: saved and loaded without remote code, and causal ones with `Conv1D` layers."""

import copy
import json
import subprocess
import sys

import pytest
import torch

from monarch_rocm import Budget, MonarchConfig, MonarchLinear, monarchize
from monarch_rocm.integrations.transformers import register, remember

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:a Monarch layer")


@pytest.fixture(autouse=True)
def quiet():
    register()
    transformers.utils.logging.disable_progress_bar()


def bert(kind="BertModel", **kwargs):
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        **kwargs,
    )
    return getattr(transformers, kind)(config).eval()


def gpt2():
    config = transformers.GPT2Config(vocab_size=60, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config).eval()


IDS = torch.arange(24).reshape(2, 12)


def output(model):
    with torch.no_grad():
        found = model(input_ids=IDS)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def same(model, again):
    one, two = model.state_dict(), again.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("build", [bert, gpt2])
@pytest.mark.parametrize("budget", [None, 0.8])
def test_a_saved_model_loads_bit_for_bit(build, budget, tmp_path):
    batches = None if budget is None else [{"input_ids": IDS}]
    model, report = monarchize(build(), MonarchConfig(nblocks=4), budget=budget, calibration=batches)
    model.save_pretrained(tmp_path)
    assert {file.suffix for file in tmp_path.iterdir()} <= {".json", ".safetensors"}
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (saved["quant_method"], saved["format"]) == ("monarch", 1)
    assert set(saved["layers"]) == {row.name for row in report}
    again = type(model).from_pretrained(tmp_path).eval()
    assert same(model, again)
    assert torch.equal(output(again), output(model))
    again.save_pretrained(tmp_path / "again")
    assert same(model, type(model).from_pretrained(tmp_path / "again"))


def test_loading_in_another_dtype_on_a_device_map_and_in_shards(tmp_path):
    model, _ = monarchize(bert(), MonarchConfig(nblocks=4))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    half = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert same(model.to(torch.bfloat16), half)
    half.float()
    pytest.importorskip("accelerate")
    placed = transformers.AutoModel.from_pretrained(tmp_path, device_map={"": "cpu"})
    assert same(model.float(), placed.to(torch.bfloat16).float())


def test_a_fresh_process_needs_one_line_to_load(tmp_path):
    monarchize(bert(), MonarchConfig(nblocks=4))[0].save_pretrained(tmp_path)
    code = (
        "import sys, monarch_rocm.integrations.transformers as t; assert 'transformers' not in sys.modules\n"
        "t.register(); t.register(); from transformers import AutoModel\n"
        f"model = AutoModel.from_pretrained({str(tmp_path)!r})\n"
        "print(sum('Monarch' in type(module).__name__ for module in model.modules()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "13"


def test_a_model_saved_without_its_head_loads_with_one(tmp_path):
    model, _ = monarchize(bert(), MonarchConfig(nblocks=4))
    model.save_pretrained(tmp_path)
    headed = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(headed.bert.pooler.dense.blkdiag1, model.pooler.dense.blkdiag1)
    assert type(headed.classifier) is torch.nn.Linear


def test_converting_while_loading(tmp_path):
    dense = bert()
    dense.save_pretrained(tmp_path)
    config = register()(nblocks=4, modules_to_not_convert=["pooler"])
    model = transformers.AutoModel.from_pretrained(tmp_path, quantization_config=config).eval()
    wanted, _ = monarchize(dense, MonarchConfig(nblocks=4), lambda module, name: "pooler" not in name)
    assert same(model, wanted)
    model.save_pretrained(tmp_path / "saved")
    assert same(model, transformers.AutoModel.from_pretrained(tmp_path / "saved"))


def test_a_part_that_was_converted_is_remembered_when_told(tmp_path):
    model = bert()
    monarchize(model.encoder, MonarchConfig(nblocks=4))
    remember(model)
    model.save_pretrained(tmp_path)
    assert same(model, transformers.AutoModel.from_pretrained(tmp_path))


def test_another_format_is_refused(tmp_path):
    monarchize(bert(), MonarchConfig(nblocks=4))[0].save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(ValueError, match="reads format 1 of Monarch structures, but got 99"):
        transformers.AutoModel.from_pretrained(tmp_path)


def test_a_causal_model_at_full_rank_gives_the_same_logits_and_text():
    dense = gpt2().double()
    config = MonarchConfig(nblocks=2, rank=16)  # 32 and more features in 2 blocks of at least 16: exact
    model, report = monarchize(copy.deepcopy(dense), config)
    assert {row.kind for row in report} == {"Conv1D"}
    assert len(report) == 8  # the head is tied to the embedding and stays
    torch.testing.assert_close(output(model), output(dense), atol=1e-12, rtol=1e-12)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    prompt = IDS[:, :5]
    wanted = dense.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, use_cache=True, **options), wanted)
    assert torch.equal(model.generate(prompt, use_cache=False, **options), wanted)


def test_a_compressed_causal_model_generates_the_same_with_cache_as_without():
    model, _ = monarchize(
        gpt2().double(), budget=Budget(0.8, nblocks=(2, 4)), calibration=[{"input_ids": IDS}]
    )
    assert any(isinstance(module, MonarchLinear) for module in model.modules())
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with_cache = model.generate(IDS[:, :5], use_cache=True, **options)
    assert torch.equal(with_cache, model.generate(IDS[:, :5], use_cache=False, **options))
