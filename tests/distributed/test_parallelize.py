"""`parallelize` changes where numbers are, not what they are: every mode against one process."""

import copy
import functools
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from distributed.support import FSDP_ON_CPUS, Net, loss_of, spawn, whole
from monarch_rocm import MonarchLinear
from monarch_rocm.distributed import MonarchParallel, NormParallel, parallelize
from monarch_rocm.distributed.parallel import shard_dim

PLACES = [
    ("replicated", "replicated"),
    ("tokens", "tokens"),
    ("replicated", "tokens"),
    ("tokens", "replicated"),
    ("features", "features"),
]


def mesh_for(mode, ranks):
    if mode == "fsdp+tp":
        return init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("all",))


def part(x, place, rank, ranks):
    if place == "replicated":
        return x.clone()
    return x.chunk(ranks, -1 if place == "features" else -2)[rank].clone()


def layer_case(rank, ranks, case):
    """Largest errors of a split layer, by name, and the collectives of its forward pass."""
    enter, leave, layout, nblocks, sizes, layer_rank = case
    torch.manual_seed(0)
    reference = MonarchLinear(*sizes, nblocks=nblocks, rank=layer_rank, layout=layout, dtype=torch.float64)
    model = nn.Sequential(copy.deepcopy(reference))
    x = torch.randn(3, 8, sizes[0], dtype=torch.float64, requires_grad=True)
    y = reference(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    plan = {"0": MonarchParallel(input=enter, output=leave)}
    parallelize(model, init_device_mesh("cpu", (ranks,)), "tp", plan=plan)
    mine = part(x.detach(), enter, rank, ranks).requires_grad_()
    out = model(mine)
    out.backward(part(dy, leave, rank, ranks))
    pairs = {"y": (out, part(y, leave, rank, ranks)), "dx": (mine.grad, part(x.grad, enter, rank, ranks))}
    for name, parameter in reference.named_parameters():
        pairs[name] = whole(model[0].get_parameter(name).grad), parameter.grad
    pairs["weight"] = model[0].weight, reference.weight
    shards = tuple(model[0].blkdiag1.to_local().shape), tuple(model[0].blkdiag2.to_local().shape)
    return {name: float((a - b).abs().max()) for name, (a, b) in pairs.items()}, shards


def all_layers(rank, ranks, cases):
    return [layer_case(rank, ranks, case) for case in cases]


@pytest.mark.parametrize("ranks", [2, 4])
def test_split_layers_equal_one_process(ranks, tmp_path):
    """Forward, every gradient, all ways in and out, padding, K != L, ranks that L does not divide."""
    cases = []
    for enter, leave in PLACES:
        for layout in ("interleaved", "blocked"):
            if leave == "features" and layout == "interleaved":
                continue
            padded = (64, 96) if enter == "features" else (61, 93)
            cases.append((enter, leave, layout, 4, (64, 96) if enter == "features" else (64, 64), None))
            cases.append((enter, leave, layout, (4, 8), padded, 2))
    cases.append(("replicated", "replicated", "interleaved", (8, 4), (48, 20), 1))
    for errors in spawn(all_layers, ranks, tmp_path, ranks, cases):
        for case, (found, (one, two)) in zip(cases, errors, strict=True):
            assert max(found.values()) < 1e-12, (case, found)
            K, L = case[3] if isinstance(case[3], tuple) else (case[3], case[3])
            assert (one[0], two[0]) == (K // ranks, L // ranks)


def feature_residual(rank, ranks):
    """Two residual blocks whose stream is split by features all the way, norms included."""

    class Mixer(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm
            self.up = MonarchLinear(32, 64, nblocks=4, layout="blocked")
            self.down = MonarchLinear(64, 32, nblocks=4, layout="blocked")

        def forward(self, x):
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    errors = {}
    for place in ("features", "tokens"):
        torch.manual_seed(0)
        reference = nn.Sequential(Mixer(nn.LayerNorm(32)), Mixer(nn.RMSNorm(32))).double()
        for p in reference.parameters():
            nn.init.normal_(p, std=0.3)
        model = copy.deepcopy(reference)
        x = torch.randn(2, 8, 32, dtype=torch.float64, requires_grad=True)
        y = reference(x)
        dy = torch.randn_like(y)
        y.backward(dy)
        plan = {
            "*.norm": NormParallel(place),
            "*.up": MonarchParallel(input=place, output="features"),
            "*.down": MonarchParallel(input="features", output=place),
        }
        parallelize(model, init_device_mesh("cpu", (ranks,)), "tp", plan=plan)
        mine = part(x.detach(), place, rank, ranks).requires_grad_()
        out = model(mine)
        out.backward(part(dy, place, rank, ranks))
        errors[place, "y"] = float((out - part(y, place, rank, ranks)).abs().max())
        errors[place, "dx"] = float((mine.grad - part(x.grad, place, rank, ranks)).abs().max())
        for name, parameter in reference.named_parameters():
            error = whole(model.get_parameter(name).grad) - parameter.grad
            errors[place, name] = float(error.abs().max())
    return errors


def test_residual_streams_split_by_features_or_tokens(tmp_path):
    """Norms of split activations, and the gradients of parameters that see a part of the tokens."""
    for errors in spawn(feature_residual, 2, tmp_path, 2):
        assert max(errors.values()) < 1e-12, errors


def train(rank, ranks, mode, options, steps=3):
    """Losses and final parameters of a model trained so; None for one process that sees all batches."""
    torch.manual_seed(0)
    model = Net().double()  # in float32, AdamW makes steps of a gradient that is rounding alone
    if mode is not None:
        model = parallelize(model, mesh_for(mode, ranks), mode, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mine = {"fsdp+tp": rank // 2, "tp": 0}.get(mode, rank)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        if mode is None:
            parts = [loss_of(model, r, step) for r in range(options["batches"])]
            torch.stack(parts).mean().backward()
        else:
            loss_of(model, mine, step).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(float(whole(norm)))
        optimizer.step()
    state = {name.removeprefix("module."): whole(p.detach()) for name, p in model.named_parameters()}
    return norms, {name: p.numpy() for name, p in state.items()}


def train_all(rank, ranks, runs):
    return [train(rank, ranks, mode, options) for mode, options in runs]


def compare(found, expected, tolerance):
    norms, state = found
    assert norms == pytest.approx(expected[0], rel=tolerance)
    assert set(state) == set(expected[1])
    for name, value in state.items():
        error = abs(value - expected[1][name]).max()
        assert error < tolerance, (name, error)


JOINED = {"*.up": MonarchParallel(output="features"), "*.down": MonarchParallel(input="features")}
SAVING = {"activation_checkpointing": True, "cpu_offload": True}
RUNS = {
    2: [("ddp", {}), ("fsdp", {}), ("tp", {}), ("fsdp", SAVING), ("tp", {"plan": JOINED})],
    4: [("fsdp", {}), ("tp", {"activation_checkpointing": True}), ("fsdp+tp", {}), ("fsdp+tp", SAVING)],
}


@FSDP_ON_CPUS
@pytest.mark.parametrize("ranks", [2, 4])
def test_training_equals_one_process(ranks, tmp_path):
    """Three clipped AdamW steps in every mode; the tied head stays tied, options change nothing."""
    expected = {n: train(0, 1, None, {"batches": n}) for n in (1, 2, 4)}
    for found in spawn(train_all, ranks, tmp_path, ranks, RUNS[ranks]):
        for (mode, _), result in zip(RUNS[ranks], found, strict=True):
            batches = {"tp": 1, "fsdp+tp": ranks // 2}.get(mode, ranks)
            compare(result, expected[batches], 1e-9)


AGAIN = {"compile": True, "activation_checkpointing": True}
COMPILED_RUNS = {
    2: [("ddp", {"compile": True}), ("tp", {**AGAIN, "plan": JOINED})],
    4: [("fsdp+tp", AGAIN)],
}


def train_compiled(rank, ranks, runs):
    """As `train_all`, and how many graphs were compiled in each run."""
    from torch._dynamo.utils import counters

    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # all but the C++ compiler
    found = []
    for mode, options in runs:
        counters.clear()
        result = train(rank, ranks, mode, options)
        found.append((result, counters["stats"]["unique_graphs"]))
        torch._dynamo.reset()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_compiled_training_equals_one_process(ranks, tmp_path):
    """With what is run again too; and units are compiled, not left to eager calls without a word."""
    expected = {n: train(0, 1, None, {"batches": n}) for n in (1, 2)}
    for found in spawn(train_compiled, ranks, tmp_path, ranks, COMPILED_RUNS[ranks]):
        for (mode, _), (result, graphs) in zip(COMPILED_RUNS[ranks], found, strict=True):
            assert graphs >= 1, mode
            compare(result, expected[{"tp": 1}.get(mode, 2)], 1e-9)


def shards_of(rank, ranks):
    """Local shapes of FSDP's shards of factors with fewer blocks than ranks, and with more."""
    model = nn.Sequential(MonarchLinear(32, 32, nblocks=2), MonarchLinear(32, 32, nblocks=8, rank=1))
    parallelize(model, mesh_for("fsdp", ranks), "fsdp")
    return [tuple(model[i].blkdiag1.to_local().shape) for i in (0, 1)]


def test_fsdp_leaves_no_rank_without_numbers(tmp_path):
    """Two blocks on four ranks: each gets a part of both."""
    assert spawn(shards_of, 4, tmp_path, 4) == [[(2, 4, 16), (2, 8, 4)]] * 4
    assert shard_dim(torch.Size((3, 5, 8)), 4) == 2
    assert shard_dim(torch.Size((3, 5, 7)), 4) == 0
    assert shard_dim(torch.Size((2, 8)), 4) == 0


def mixed(rank, ranks):
    torch.manual_seed(0)
    model = Net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model = parallelize(
        model, mesh_for("fsdp", ranks), "fsdp", mixed_precision=torch.bfloat16, activation_checkpointing=True
    )
    seen = []
    model.blocks[0].up.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    loss = loss_of(model, rank, 0)
    loss.backward()
    dtypes = {p.grad.dtype for p in model.parameters()}
    same = all(torch.equal(whole(p), before[name]) for name, p in model.named_parameters())
    return seen[0], dtypes, same


@FSDP_ON_CPUS
def test_mixed_precision(tmp_path):
    """Products in bfloat16, parameters and gradients in float32."""
    for seen, dtypes, same in spawn(mixed, 2, tmp_path, 2):
        assert seen == torch.bfloat16
        assert dtypes == {torch.float32}
        assert same


def refusals(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    texts = {}

    def refused(name, kind, model, *args, **kwargs):
        before = {n: type(p) for n, p in model.named_parameters()}
        with pytest.raises(kind) as caught:
            parallelize(model, *args, **kwargs)
        assert before == {n: type(p) for n, p in model.named_parameters()}
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        texts[name] = str(caught.value)

    def layer(**kwargs):
        return nn.Sequential(MonarchLinear(32, 32, **{"nblocks": 4, **kwargs}))

    features = {"0": MonarchParallel(output="features")}
    refused("mode", ValueError, layer(), mesh, "monarch_tp")
    refused("mesh", TypeError, layer(), 2, "tp")
    refused("dimensions", ValueError, layer(), mesh, "fsdp+tp")
    refused("offload", ValueError, layer(), mesh, "tp", cpu_offload=True)
    refused("precision", ValueError, layer(), mesh, "ddp", mixed_precision=torch.bfloat16)
    refused("plan", ValueError, layer(), mesh, "ddp", plan=features)
    refused("blocks", ValueError, nn.Sequential(layer(), layer(nblocks=3)), mesh, "tp")
    refused("none", ValueError, nn.Linear(4, 4), mesh, "tp")
    refused("pattern", ValueError, layer(), mesh, "tp", plan={"up": MonarchParallel()})
    refused("interleaved", ValueError, layer(), mesh, "tp", plan=features)
    refused("reference", ValueError, layer(backend="reference"), mesh, "tp")
    refused("kind", TypeError, nn.Linear(4, 4), mesh, "tp", plan={"": MonarchParallel()})
    model = parallelize(layer(), mesh, "tp")
    with pytest.raises(RuntimeError, match="last dimension of x must be 32"):
        model(torch.ones(2, 31))
    return texts


def test_what_cannot_be_is_refused_before_anything_changes(tmp_path):
    """An error names what was given and what fits, and the model is as it was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        texts = spawn(refusals, 2, tmp_path, 2)[0]
    said = {
        "mode": "monarch_tp",
        "mesh": "init_device_mesh",
        "dimensions": "2 dimensions, but it has 1",
        "offload": "cpu_offload is for the FSDP modes",
        "precision": "torch.autocast",
        "plan": "TP modes",
        "blocks": "1.0: a Monarch layer 32->32, 3 blocks, rank 3.667, interleaved cannot be split: K = 3",
        "none": "no MonarchLinear",
        "pattern": "no module fits ['up']",
        "interleaved": "layout='blocked'",
        "reference": "backend='torch' is",
        "kind": "not a Linear",
    }
    for name, text in said.items():
        assert text in texts[name], (name, texts[name])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: MonarchParallel(input="sharded"), "input='sharded'"),
        (lambda: NormParallel("replicated"), "place"),
    ],
    ids=["layer", "norm"],
)
def test_unknown_places(make, text):
    with pytest.raises(ValueError, match=text):
        make()
