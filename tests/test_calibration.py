"""What layers are fed is gathered right, and conversion uses it without leaving marks on the model."""

import copy

import pytest
import torch
from torch import nn

from monarch_rocm import MonarchConfig, MonarchLinear, fitting, monarchize
from monarch_rocm.calibration import Moments, moments, sensitivities


class Model(nn.Module):
    """Tokens of several sequences through two layers, as an encoder has them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.idle = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.5)

    def forward(self, input_ids, attention_mask=None):
        return self.down(torch.relu(self.up(self.dropout(self.embed(input_ids)))))


def batches(masked=True):
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(4):
        ids = torch.randint(50, (3, 7), generator=generator)
        mask = (torch.arange(7) < torch.tensor([[7], [4], [1]])).long()
        found.append({"input_ids": ids, "attention_mask": mask} if masked else (ids,))
    return found


def test_moments_are_those_of_the_kept_rows_with_each_sequence_counted_once():
    model = Model()
    found = moments(model, [model.up, model.idle], batches())
    assert set(found) == {model.up}
    rows, weights = [], []
    for batch in batches():
        for sequence, mask in zip(*batch.values(), strict=True):
            kept = model.embed(sequence[mask.bool()]).detach().double()
            rows.append(kept)
            weights.append(torch.full((len(kept),), 1 / len(kept), dtype=torch.float64))
    x, w = torch.cat(rows), torch.cat(weights)
    seen = found[model.up]
    assert seen.weight == pytest.approx(12)
    mean = (w @ x) / 12
    torch.testing.assert_close(seen.mean, mean)
    torch.testing.assert_close(seen.about(None), (x * w[:, None]).T @ x / 12)
    torch.testing.assert_close(seen.about(mean), ((x - mean) * w[:, None]).T @ (x - mean) / 12)


def test_moments_of_parts_add_up():
    x = torch.randn(9, 4)
    whole, one, two = (Moments(4, x.device) for _ in range(3))
    whole.add(x, torch.ones(9))
    one.add(x[:5], torch.ones(5))
    two.add(x[5:], torch.ones(4))
    torch.testing.assert_close((one + two).about(whole.mean), whole.about(whole.mean))


@pytest.mark.parametrize("batch", [torch.ones(5, 8), (torch.ones(5, 8),), torch.ones(2, 5, 8)])
def test_batches_of_any_form(batch):
    model = nn.Sequential(nn.Linear(8, 4))
    assert moments(model, [model[0]], [batch])[model[0]].weight > 0


def test_a_batch_with_labels_is_refused_with_what_to_do():
    model, batch = nn.Sequential(nn.Linear(8, 8)), (torch.randn(4, 8), torch.zeros(4))
    with pytest.raises(TypeError, match="leave out what the model does not take, such as labels"):
        moments(model, [model[0]], [batch])


def test_the_model_is_left_as_it_was():
    model = Model().train()
    model.up.eval()
    before = copy.deepcopy(model.state_dict())
    moments(model, [model.up], batches(masked=False))
    assert model.training
    assert not model.up.training
    assert model.dropout.training
    assert not model.up._forward_pre_hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Flattening(Model):
    """As experts do: rows without their sequences; padding that holds nothing finite; named inputs."""

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        x = torch.where(attention_mask[..., None].bool(), x, torch.nan)
        return self.up(input=x.flatten(0, 1))


def test_flattened_rows_named_inputs_and_padding_of_any_value():
    model = Flattening()
    seen = moments(model, [model.up], batches())[model.up]
    assert seen.weight == pytest.approx(12)
    assert seen.mean.isfinite().all()
    expected = torch.stack(
        [
            model.embed(ids[mask.bool()]).double().mean(0)
            for batch in batches()
            for ids, mask in zip(*batch.values(), strict=True)
        ]
    ).mean(0)
    torch.testing.assert_close(seen.mean, expected)


def test_compiled_parts_that_have_run_are_watched_too():
    block = nn.Sequential(nn.Linear(8, 8))
    model = nn.Sequential(torch.compile(block, backend="eager"), nn.Linear(8, 4))
    model(torch.randn(3, 8))
    assert set(moments(model, [block[0], model[1]], [torch.randn(3, 8)])) == {block[0], model[1]}


def test_nothing_to_see_or_broken_inputs_raise_and_unhook():
    model = Model()
    with pytest.raises(ValueError, match="no batches"):
        moments(model, [model.up], [])
    model.embed.weight.data[:] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        moments(model, [model.up], batches())
    assert not model.up._forward_pre_hooks


def outputs(model):
    with torch.no_grad():
        return torch.cat([model.eval()(**batch)[batch["attention_mask"].bool()] for batch in batches()])


def test_a_calibrated_model_answers_nearer_to_the_dense_one():
    torch.manual_seed(0)
    dense = Model()
    dense.embed.weight.data[:, :4] *= 10
    dense.up.bias.data += 1
    config = MonarchConfig(nblocks=4, rank=1)
    plain, _ = monarchize(copy.deepcopy(dense), config)
    fitted, report = monarchize(copy.deepcopy(dense), config, calibration=batches())
    change = [float((outputs(model) - outputs(dense)).norm()) for model in (plain, fitted)]
    assert change[1] < 0.8 * change[0]
    rows = {row.name: row for row in report}
    assert 0 < rows["up"].output_error < rows["up"].weight_error
    # A layer that no batch came to is projected as without calibration.
    assert torch.isnan(torch.tensor(rows["idle"].output_error))
    assert torch.equal(fitted.idle.weight, plain.idle.weight)
    assert "output error" in str(report)


def test_a_bias_of_its_own_takes_up_the_change_of_the_mean_and_no_other_does():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16, bias=False))
    dense[1].bias = dense[0].bias
    before = dense[0].bias.clone()
    x = torch.randn(64, 16) + 3
    fitted, _ = monarchize(copy.deepcopy(dense), MonarchConfig(rank=1), calibration=[x])
    assert torch.equal(fitted[0].bias, before)
    assert fitted[1].bias is fitted[0].bias
    one, x = dense[0].double(), x.double()
    alone, _ = monarchize(copy.deepcopy(one), MonarchConfig(rank=1), calibration=[x])
    assert isinstance(alone, MonarchLinear)
    torch.testing.assert_close(alone(x).mean(0), one(x).mean(0))


@pytest.mark.parametrize("repeats", [1, 2])
def test_inputs_that_never_vary_are_fitted_like_any(repeats):
    """About their mean nothing is left but rounding, and the bias takes up all of the change."""
    for seed in range(10):
        torch.manual_seed(seed)
        dense, row = nn.Linear(16, 16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
        same = [row.expand(2, 7, 16), row.expand(3, 5, 16)][:repeats]
        fitted, report = monarchize(copy.deepcopy(dense), MonarchConfig(rank=1), calibration=same)
        assert report.rows[0].weight_error < 1.01
        torch.testing.assert_close(fitted(row), dense(row))


def test_a_fit_that_fails_leaves_the_model_as_it_was(monkeypatch):
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    before = copy.deepcopy(dense.state_dict())
    taken = dense.state_dict()
    real, calls = fitting.fit_to, []

    def fails_second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return real(*args)

    monkeypatch.setattr(fitting, "fit_to", fails_second)
    with pytest.raises(torch.OutOfMemoryError):
        monarchize(dense, MonarchConfig(rank=1), calibration=[torch.randn(64, 16) + 3])
    assert type(dense[0]) is nn.Linear
    assert all(torch.equal(value, before[name]) for name, value in dense.state_dict().items())
    monkeypatch.undo()
    monarchize(dense, MonarchConfig(rank=1), calibration=[torch.randn(64, 16) + 3])
    assert torch.equal(taken["0.bias"], before["0.bias"])


def test_a_shared_weight_is_fitted_to_the_inputs_of_all_its_layers():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    dense[2].weight = dense[0].weight
    fitted, report = monarchize(
        copy.deepcopy(dense), MonarchConfig(rank=1), calibration=[torch.randn(64, 16)]
    )
    assert fitted[2].blkdiag1 is fitted[0].blkdiag1
    assert report.rows[0].output_error == report.rows[1].output_error


@pytest.mark.parametrize(
    ("model", "config", "said"),
    [
        (nn.Linear(8, 8), MonarchConfig(init="random"), "init='random'"),
        (nn.Linear(8, 8, device="meta"), MonarchConfig(), "meta device"),
        (nn.Linear(8, 8, dtype=torch.complex64), MonarchConfig(), "complex64"),
    ],
)
def test_calibration_that_cannot_run_says_why(model, config, said):
    with pytest.raises(ValueError, match=said):
        monarchize(model, config, calibration=[torch.randn(4, 8)])


@pytest.mark.parametrize("frozen", [False, True])
def test_sensitivities_are_the_squared_derivatives_of_the_output(frozen):
    model = Model().requires_grad_(not frozen)
    found = sensitivities(model, [model.up, model.idle], batches() * 150)
    assert set(found) == {model.up}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.up._forward_hooks
    expected = torch.zeros(32, 32)
    for batch in batches():
        hidden = model.up(model.embed(batch["input_ids"]))
        mask = batch["attention_mask"]
        for x, weight in zip(hidden.flatten(0, 1), (mask / mask.sum(1, keepdim=True)).flatten(), strict=True):
            jacobian = model.down.weight * (x > 0)
            expected += weight * (jacobian.T @ jacobian).detach() / 12
    change = torch.linalg.norm(found[model.up].float() - expected) / torch.linalg.norm(expected)
    assert change < 0.15  # 600 projections of 16 outputs at 7 positions of 3 sequences


def test_a_readout_alone_decides_what_matters():
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    x = torch.randn(16, 8)
    found = sensitivities(model, [model[1]], [x] * 50, lambda output, batch: output[:, :2])[model[1]]
    torch.testing.assert_close(found[2:], torch.zeros(2, 4, dtype=found.dtype))
    assert (found.diagonal()[:2] - 1).abs().max() < 0.3


def test_sensitivities_of_logits_are_those_of_the_predicted_distribution():
    class Output(dict):
        @property
        def logits(self):
            return self["logits"]

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 5)

        def forward(self, x):
            return Output(logits=self.layer(x))

    model, x = Head(), torch.randn(4000, 4)
    found = sensitivities(model, [model.layer], [x])[model.layer].float()
    p = model(x).logits.softmax(-1).detach()
    fisher = torch.diag(p.mean(0)) - p.T @ p / len(p)
    torch.testing.assert_close(found, fisher, atol=0.02, rtol=0)


def test_readouts_need_calibration_and_outputs_need_tensors():
    with pytest.raises(ValueError, match="none were given"):
        monarchize(Model(), readout=lambda output, batch: output)
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(TypeError, match="no floating tensor"):
        sensitivities(model, [model[0]], [torch.randn(2, 8)], lambda output, batch: None)
    assert not model[0]._forward_hooks


def test_layers_that_the_output_does_not_depend_on_stay_dense_in_a_budget():
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    model.forward = lambda x: (model["a"](x), model["b"](x))[0]
    model, report = monarchize(model, budget=0.7, calibration=[torch.randn(64, 64)])
    assert [row.name for row in report] == ["a"]
    assert any(skip.name == "b" and "depend" in skip.reason for skip in report.skipped)
