"""`heal` brings a student nearer, leaves the teacher alone, and goes on where it was stopped."""

import copy

import pytest
import torch
from torch import nn

from monarch_rocm import MonarchConfig, MonarchLinear, heal, monarchize


def models():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 32))
    student, _ = monarchize(copy.deepcopy(teacher), MonarchConfig(nblocks=4, rank=2))
    return student, teacher


def data(count=60):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 32, generator=generator) for _ in range(count)]


def apart(student, teacher):
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return float((student.eval()(x) - teacher.eval()(x)).norm())


@pytest.mark.parametrize("layerwise", [0.0, 1.0])
def test_a_student_comes_nearer_on_inputs_it_never_saw(layerwise):
    student, teacher = models()
    before, kept = apart(student, teacher), copy.deepcopy(teacher.state_dict())
    healing = heal(student, teacher, data(), steps=180, lr=3e-3, layerwise=layerwise, progress=False)
    assert apart(student, teacher) < 0.8 * before
    assert len(healing.losses) == 180
    assert all(torch.equal(value, kept[name]) for name, value in teacher.state_dict().items())
    assert all(parameter.grad is None for parameter in (*student.parameters(), *teacher.parameters()))
    assert not any(module._forward_hooks for module in (*student.modules(), *teacher.modules()))


def test_modes_and_frozen_parameters_are_kept():
    student, teacher = models()
    student.train()
    student[0].requires_grad_(False)
    frozen, free = student[0].blkdiag1.clone(), student[3].blkdiag1.clone()
    heal(student, teacher, data(5), progress=False)
    assert student.training
    assert student[2].training
    assert torch.equal(student[0].blkdiag1, frozen)
    assert not torch.equal(student[3].blkdiag1, free)


class InterruptedRunError(Exception):
    pass


@pytest.mark.parametrize("stop", [1, 10, 25])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path, stop):
    whole, teacher = models()
    heal(whole, teacher, data(30), progress=False)

    def broken():
        yield from data(30)[:stop]
        raise InterruptedRunError

    part, file = models()[0], tmp_path / "heal.pt"
    with pytest.raises(InterruptedRunError):
        heal(part, teacher, broken(), steps=30, checkpoint=file, every=5, progress=False)
    again = models()[0]
    healing = heal(again, teacher, data(30), checkpoint=file, every=5, progress=False)
    assert healing.resumed_at == stop // 5 * 5
    assert len(healing.losses) == 30
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    done = models()[0]
    assert heal(done, teacher, data(30), checkpoint=file, progress=False).resumed_at == 30
    assert torch.equal(done[0].blkdiag1, whole[0].blkdiag1)


def test_only_the_readout_is_compared():
    student, teacher = models()
    student[3].bias.data[1:] += 100

    def readout(output, batch):
        return output[:, :1] * batch["input"][:, :1]

    heal(student, teacher, [{"input": x} for x in data()], readout=readout, layerwise=0, progress=False)
    assert (student[3].bias - teacher[3].bias)[1:].min() > 99


def test_padding_does_not_count():
    class Sequences(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, attention_mask):
            return self.layer(x)

    teacher = Sequences()
    student, _ = monarchize(copy.deepcopy(teacher), MonarchConfig(nblocks=2, rank=1))
    x, mask = torch.randn(2, 5, 8), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    found = []
    for filler in (0.0, 1e3):
        x[0, 3:] = filler
        batch = {"x": x.clone(), "attention_mask": mask}
        found += heal(copy.deepcopy(student), teacher, [batch], progress=False).losses
    assert found[0] == found[1]


def test_what_cannot_be_healed_says_why(tmp_path):
    student, teacher = models()
    with pytest.raises(ValueError, match="steps must be given"):
        heal(student, teacher, iter(data(3)), progress=False)
    with pytest.raises(ValueError, match="at least 1"):
        heal(student, teacher, data(3), steps=0, progress=False)
    with pytest.raises(ValueError, match="no batches"):
        heal(student, teacher, [], steps=1, progress=False)
    with pytest.raises(ValueError, match="iterated again"):
        heal(student, teacher, iter(data(3)), steps=4, progress=False)
    with pytest.raises(ValueError, match="no Monarch layers"):
        heal(copy.deepcopy(teacher), teacher, data(1), progress=False)
    with pytest.raises(ValueError, match="no module '0'"):
        heal(student, nn.Linear(32, 32), data(1), progress=False)
    with pytest.raises(FloatingPointError, match="step 1 is nan"):
        heal(student, teacher, [data(1)[0], torch.full((4, 32), torch.nan)], progress=False)
    file = tmp_path / "heal.pt"
    heal(student, teacher, data(3), checkpoint=file, progress=False)
    with pytest.raises(ValueError, match="another run"):
        heal(student, teacher, data(4), checkpoint=file, progress=False)
    other = nn.Sequential(MonarchLinear(32, 32))
    with pytest.raises(ValueError, match="another student"):
        heal(other, nn.Sequential(nn.Linear(32, 32)), data(3), checkpoint=file, progress=False)
    file.write_bytes(b"broken")
    with pytest.raises(ValueError, match="no checkpoint of heal"):
        heal(student, teacher, data(3), checkpoint=file, progress=False)
    student.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        heal(student, teacher, data(3), progress=False)
