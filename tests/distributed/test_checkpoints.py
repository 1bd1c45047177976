"""A checkpoint is whole or does not count, and loads however the model is spread."""

import random
import shutil
import warnings

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh

from distributed.support import FSDP_ON_CPUS, Net, loss_of, spawn
from monarch_rocm import MonarchLinear
from monarch_rocm.distributed import Checkpoints, parallelize


def build(mode, ranks, seed):
    torch.manual_seed(seed)
    model = Net().double()
    if mode == "fsdp+tp":
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    elif mode is not None:
        mesh = init_device_mesh("cpu", (ranks,))
    if mode is not None:
        model = parallelize(model, mesh, mode)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def all_numbers(model, optimizer):
    """Every parameter and every moment, whole, by name; on rank 0 alone."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights, moments = get_state_dict(model, optimizer, options=options)
    found = {f"model.{name}": value.numpy() for name, value in weights.items()}
    for name, state in moments.get("state", {}).items():
        found |= {f"{name}.{key}": numpy.asarray(value) for key, value in state.items()}
    return found


def save_each(rank, ranks, modes, folder):
    saved = {}
    for mode in modes:
        model, optimizer = build(mode, ranks, seed=1)
        for step in range(2):
            loss_of(model, 0, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        extra = {"position": 100 + rank}
        Checkpoints(folder / mode, every=1).save(2, model, optimizer, extra)
        saved[mode] = all_numbers(model, optimizer)
    return saved


def load_each(rank, ranks, modes, sources, folder):
    found = {}
    for mode in modes:
        for source in sources:
            model, optimizer = build(mode, ranks, seed=2)
            step, extra = Checkpoints(folder / source, every=1).load(model, optimizer)
            found[mode, source] = step, extra, all_numbers(model, optimizer)
    return found


@FSDP_ON_CPUS
def test_checkpoints_load_in_every_other_mode(tmp_path):
    """Saved on four ranks in four modes, loaded on two ranks in three and in one process."""
    modes = ["ddp", "fsdp", "tp", "fsdp+tp"]
    folder = tmp_path / "saved"
    saved = spawn(save_each, 4, tmp_path / "four", 4, modes, folder)[0]
    two = spawn(load_each, 2, tmp_path / "two", 2, ["ddp", "fsdp", "tp"], modes, folder)
    one = load_each(0, 1, [None], modes, folder)
    for rank, found in enumerate([*two, one]):
        assert found
        for (mode, source), (step, extra, numbers) in found.items():
            assert (step, extra) == (2, {"position": 100 + rank % 2})
            if rank == 1:
                continue  # whole numbers are on rank 0
            assert set(numbers) == set(saved[source])
            assert len(numbers) > 2 * len(list(Net().parameters()))
            for name, value in numbers.items():
                assert (value == saved[source][name]).all(), (mode, source, name)


@pytest.fixture
def small():
    model = MonarchLinear(8, 8, nblocks=2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def saved(small, path, steps, **kwargs):
    model, optimizer = small
    checkpoints = Checkpoints(path, every=1, **kwargs)
    for step in steps:
        nn.init.constant_(model.blkdiag1, step)
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        nn.init.constant_(model.blkdiag1, step)
        checkpoints.save(step, model, optimizer)
    return checkpoints


def newest(folder, pattern):
    return sorted(folder.glob(pattern))[-1]


def truncate(folder):
    path = newest(folder, "*.distcp")
    path.write_bytes(path.read_bytes()[:-10])


def flip(folder):
    path = newest(folder, "*.distcp")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "data cut": (truncate, "bytes of"),
    "one bit": (flip, "checksum"),
    "no metadata": (lambda folder: (folder / ".metadata").unlink(), "missing"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "no manifest"),
    "manifest cut": (lambda folder: (folder / "manifest.json").write_text('{"st'), "no manifest"),
    "empty": (lambda folder: (shutil.rmtree(folder), folder.mkdir()), "no manifest"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_half_a_checkpoint_is_passed_over(small, tmp_path, damage):
    """The one before it loads instead, and why is said."""
    checkpoints = saved(small, tmp_path, [1, 2])
    hurt, text = DAMAGES[damage]
    hurt(checkpoints.folder(2))
    model, optimizer = small
    said = []
    with pytest.warns(UserWarning, match="step-00000002 is not whole"):
        assert checkpoints.load(model, optimizer, said) == (1, None)
    assert (model.blkdiag1 == 1).all()
    assert len(said) == 1
    assert text in said[0]


def test_a_write_that_ended_half_way_leaves_the_others(small, tmp_path):
    """A draft counts for nothing, and the next save of that step replaces it."""
    checkpoints = saved(small, tmp_path, [1])
    draft = tmp_path / ".draft-00000002"
    shutil.copytree(checkpoints.folder(1), draft)
    assert checkpoints.steps() == [1]
    assert checkpoints.load(*small)[0] == 1
    saved(small, tmp_path, [2])
    assert not draft.exists()
    assert checkpoints.load(*small)[0] == 2


def test_only_the_newest_are_kept(small, tmp_path):
    assert saved(small, tmp_path, [1, 2, 3, 4], keep=2).steps() == [3, 4]


def test_nothing_there(small, tmp_path):
    assert Checkpoints(tmp_path / "none", every=5).load(*small) is None


def test_random_generators_go_on_where_they_were(small, tmp_path):
    """PyTorch's, Python's and NumPy's."""

    def draw():
        return torch.rand(3).tolist(), random.random(), numpy.random.rand()

    checkpoints = saved(small, tmp_path, [1])
    expected = draw()
    draw()
    checkpoints.load(*small)
    assert draw() == expected


@pytest.mark.parametrize("name", ["every", "keep"])
def test_bad_numbers_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}=0"):
        Checkpoints(tmp_path, **{"every": 1, name: 0})


def test_when_a_run_saves(tmp_path):
    """Every so many steps, and the last."""
    checkpoints = Checkpoints(tmp_path, every=4)
    assert [done for done in range(1, 11) if checkpoints.due(done, 10)] == [4, 8, 10]
