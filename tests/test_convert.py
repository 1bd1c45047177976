"""`monarchize`: what is replaced, what stays, and what is carried over."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from monarch_rocm import MonarchConfig, MonarchLinear, monarchize

FULL = MonarchConfig(nblocks=2, rank=16)  # 32 features in 2 blocks: exact
pytestmark = pytest.mark.filterwarnings("ignore:a Monarch layer")


def linear(**kwargs):
    return nn.Linear(32, 32, **kwargs)


def test_a_model_is_changed_in_place():
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Sequential(nn.Linear(256, 64, bias=False)))
    dense = copy.deepcopy(model)
    got, report = monarchize(model, MonarchConfig(nblocks=4, layout="blocked", backend="torch"))
    assert got is model
    assert [type(m) for m in (model[0], model[2][0])] == [MonarchLinear] * 2
    assert (model[0].shape.layout, model[0].backend) == ("blocked", "torch")
    assert [row.name for row in report] == ["0", "2.0"]
    assert [row.kind for row in report] == ["Linear", "Linear"]
    assert report.params_before == sum(p.numel() for p in dense.parameters())
    assert report.params_after == sum(p.numel() for p in model.parameters())
    for row, old in zip(report, (dense[0], dense[2][0]), strict=True):
        new = model.get_submodule(row.name)
        error = torch.linalg.vector_norm(new.weight - old.weight) / torch.linalg.vector_norm(old.weight)
        assert row.weight_error == pytest.approx(float(error), rel=1e-4)
        assert row.params_before == sum(p.numel() for p in old.parameters())
        assert row.params_after == sum(p.numel() for p in new.parameters())
        assert row.shape == new.shape
    assert model(torch.randn(2, 64)).shape == (2, 64)


def test_full_rank_keeps_the_function():
    model = nn.Sequential(linear(), nn.Tanh(), linear(bias=False))
    x = torch.randn(5, 32)
    exact = model(x)
    model, _ = monarchize(model, FULL)
    torch.testing.assert_close(model(x), exact, rtol=1e-4, atol=1e-5)


def test_root():
    root = linear()
    model, report = monarchize(root, FULL)
    assert type(model) is MonarchLinear
    assert report.rows[0].name == ""
    assert "(root)" in str(report)
    untouched = nn.ReLU()
    assert monarchize(untouched)[0] is untouched


def test_shared_modules_stay_one():
    one = linear()
    model = nn.ModuleDict({"a": nn.Sequential(one), "b": nn.Sequential(one, nn.ReLU())})
    model, report = monarchize(model, FULL)
    assert model["a"][0] is model["b"][0]
    assert type(model["a"][0]) is MonarchLinear
    assert len(report) == 1


def test_two_tied_linears_stay_tied():
    model = nn.Sequential(linear(), linear())
    model[1].weight = model[0].weight
    model, report = monarchize(model, FULL)
    assert model[0] is not model[1]
    assert model[0].blkdiag1 is model[1].blkdiag1
    assert model[0].blkdiag2 is model[1].blkdiag2
    assert model[0].bias is not model[1].bias
    assert len(report) == 2
    assert report.params_after == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("how", ["filter", "embedding"])
def test_weight_tied_to_what_stays_dense_is_left_alone(how):
    model = nn.ModuleDict(
        {"other": linear() if how == "filter" else nn.Embedding(32, 32), "head": linear(), "x": linear()}
    )
    model["head"].weight = model["other"].weight
    model, report = monarchize(model, FULL, lambda module, name: name != "other")
    assert type(model["head"]) is nn.Linear
    assert model["head"].weight is model["other"].weight
    assert [row.name for row in report] == ["x"]
    assert {s.name: s.reason for s in report.skipped}[
        "head"
    ] == "its weight is tied to a module that stays dense"
    assert "tied" in str(report)


def test_what_is_kept():
    layer = linear(dtype=torch.bfloat16).eval()
    layer.weight.requires_grad_(False)
    layer.note = "mine"
    seen = []
    handle = layer.register_forward_hook(lambda module, args, out: seen.append(type(module)))
    layer.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model = nn.Sequential(layer)
    bias = layer.bias
    model, _ = monarchize(model, FULL)
    new = model[0]
    assert new.bias is bias
    assert new.bias.requires_grad
    assert not new.blkdiag1.requires_grad
    assert not new.blkdiag2.requires_grad
    assert new.blkdiag1.dtype == torch.bfloat16
    assert not new.training
    assert new.note == "mine"
    model(torch.randn(2, 32, dtype=torch.bfloat16))
    assert seen == ["before", MonarchLinear]
    handle.remove()
    model(torch.randn(2, 32, dtype=torch.bfloat16))
    assert seen[2:] == ["before"]


def test_state_dict_hooks_get_the_new_layer():
    layer = linear()
    seen = []
    layer.register_load_state_dict_pre_hook(lambda module, *args: seen.append(type(module)))
    model = nn.Sequential(layer)
    del layer
    model, _ = monarchize(model, FULL)
    model.load_state_dict(model.state_dict())
    assert seen == [MonarchLinear]


def test_attributes_that_the_new_layer_needs_are_its_own():
    layer = linear()
    layer.shape, layer.backend, layer.weight.no_decay = (1, 2), "mine", True
    model, _ = monarchize(nn.Sequential(layer), FULL)
    assert model(torch.randn(2, 32)).shape == (2, 32)
    assert model[0].backend == "auto"
    assert model[0].blkdiag1.no_decay
    assert model[0].blkdiag2.no_decay


def test_encoder_layers_without_the_usual_linears():
    class Own(nn.TransformerEncoderLayer):
        def __init__(self):
            super().__init__(32, 4, 64)
            del self.linear1, self.linear2
            self.other = linear()

    model, _ = monarchize(Own(), FULL)
    assert type(model.other) is MonarchLinear


def test_compiled_root_is_left_alone():
    model = torch.compile(linear(), backend="eager")
    model, report = monarchize(model, FULL)
    assert report.skipped[0].reason == "it was compiled on its own"
    assert not report.rows


def test_model_must_be_a_module():
    with pytest.raises(TypeError, match="list"):
        monarchize([linear()])


def test_meta_models_stay_on_meta():
    with torch.device("meta"):
        model = nn.Sequential(linear(), linear(bias=False))
    model, report = monarchize(model)
    assert all(p.is_meta for p in model.parameters())
    assert all(row.weight_error != row.weight_error for row in report)
    model.to_empty(device="cpu")
    model[0].reset_parameters()


def test_random_init_takes_new_factors():
    model = nn.Sequential(linear(dtype=torch.float64))
    dense = model[0].weight.detach().clone()
    model, report = monarchize(model, MonarchConfig(nblocks=2, init="random"))
    assert model[0].blkdiag1.dtype == torch.float64
    assert report.rows[0].weight_error != report.rows[0].weight_error
    assert 0.3 < float(model[0].weight.var() / dense.var()) < 3
    assert torch.linalg.vector_norm(model[0].weight - dense) > torch.linalg.vector_norm(dense)


class Own(nn.Linear):
    pass


LEFT_ALONE = {
    "a subclass": (lambda: Own(32, 32), "subclass"),
    "lazy": (lambda: nn.LazyLinear(32), "subclass"),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(linear()), "subclass"),
    "old weight norm": (lambda: nn.utils.weight_norm(linear()), "weight_g"),
    "pruned": (lambda: prune.l1_unstructured(linear(), "weight", 3), "weight_orig"),
    "gradient hook": (lambda: hooked(linear()), "gradient hooks"),
    "float8": (lambda: linear().to(torch.float8_e4m3fn), "float8"),
    "own forward": (lambda: own_forward(linear()), "forward was replaced"),
    "compiled": (lambda: compiled(linear()), "compiled"),
    "empty": (lambda: nn.Linear(32, 0), "empty"),
}


def own_forward(module):
    module.forward = lambda x: x
    return module


def hooked(module):
    module.weight.register_hook(lambda grad: grad)
    return module


def compiled(module):
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize("what", LEFT_ALONE)
@pytest.mark.filterwarnings("ignore")
def test_what_is_left_alone_is_reported(what):
    make, reason = LEFT_ALONE[what]
    module = make()
    model, report = monarchize(nn.Sequential(module, linear()), FULL)
    assert model[0] is module
    assert type(model[1]) is MonarchLinear
    assert reason in report.skipped[0].reason


def test_multihead_attention_still_works():
    model = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(2, 5, 32)
    exact = model(x, x, x)[0]
    model, report = monarchize(model)
    assert [s.name for s in report.skipped] == ["out_proj"]
    with torch.no_grad():
        torch.testing.assert_close(model(x, x, x)[0], exact)


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2).eval()


def test_encoder_layers_are_left_alone_by_default():
    _, report = monarchize(encoder())
    assert not report.rows
    assert sum("fused path" in s.reason for s in report.skipped) == 4


def test_encoder_layers_are_right_where_asked_for():
    """The fused path reads `.weight`, which is dense and right; the plain path runs the factors."""
    model, report = monarchize(encoder(), MonarchConfig(nblocks=2, rank=4), lambda module, name: True)
    assert len(report) == 4
    x = torch.randn(2, 5, 32)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    plain = model(x, src_key_padding_mask=mask)
    with torch.no_grad():
        fused = model(x, src_key_padding_mask=mask)
    torch.testing.assert_close(fused[0], plain[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fused[1, :3], plain[1, :3], rtol=1e-4, atol=1e-5)


def test_filter_sees_module_and_full_name():
    model = nn.Sequential(nn.Sequential(linear()), linear())
    seen = []
    monarchize(model, FULL, lambda module, name: seen.append((type(module), name)) is not None)
    assert seen == [(nn.Linear, "0.0"), (nn.Linear, "1")]
    assert type(model[1]) is nn.Linear


def test_bad_weights_are_refused_before_any_layer_is_touched():
    model = nn.Sequential(linear(), linear())
    model[1].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="layer '1': weight has 1 entries that are not finite"):
        monarchize(model, FULL)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"nblocks": 0}, ValueError),
        ({"nblocks": (1, 2, 3)}, ValueError),
        ({"nblocks": 2.5}, TypeError),
        ({"rank": 0}, ValueError),
        ({"layout": "fly"}, ValueError),
        ({"backend": "hip"}, ValueError),
        ({"init": "svd"}, ValueError),
    ],
)
def test_bad_configs_are_refused(kwargs, error):
    with pytest.raises(error):
        MonarchConfig(**kwargs)


def test_config_must_be_one():
    with pytest.raises(TypeError, match="dict"):
        monarchize(nn.Sequential(linear()), {"nblocks": 4})


def test_config_survives_json():
    for config in (MonarchConfig(), MonarchConfig((4, 8), 3, "blocked", "torch", "random")):
        assert MonarchConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match="blocks"):
        MonarchConfig.from_dict({"blocks": 4})


@pytest.mark.slow
def test_conv1d_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        exact = model(tokens).logits
        model, report = monarchize(model, FULL_GPT)
        torch.testing.assert_close(model(tokens).logits, exact, rtol=1e-4, atol=1e-5)
    assert {row.kind for row in report} == {"Conv1D"}
    assert len(report) == 4
    assert [s.name for s in report.skipped] == ["lm_head"]


FULL_GPT = MonarchConfig(nblocks=2, rank=64)
