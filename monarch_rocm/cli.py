"""The command `monarch-rocm`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console

import monarch_rocm
from monarch_rocm import bench, dispatch, doctor, estimate
from monarch_rocm.allocation import COSTS
from monarch_rocm.codegen.assembly import LDS
from monarch_rocm.shape import LAYOUTS, MonarchShape, check_size

DTYPES = ("bfloat16", "float16", "float32")
TUNE = """\
Measure every config of the kernels that a layer launches, and PyTorch's products, on this GPU, and
keep the winners in your own tables, which go before the shipped ones: 'auto' then takes a kernel
exactly where it was measured faster. docs/tuning.md says more."""
COMPRESS = """\
Compress a folder with a transformers model: layers get blocks and ranks within a budget, fitted to texts
such as the model will see. A run that was stopped goes on when the same command is given again. The
new folder loads with from_pretrained after monarch_rocm.integrations.transformers.register()."""
PLAN = """\
What a layer would cost for several numbers of blocks, beside nn.Linear: parameters, FLOPs, bytes, and
the time that a model predicts. Nothing is run, and no GPU is needed. docs/choosing.md says more."""
BENCH = """\
Time layers against nn.Linear and against the op that others published, on this GPU: some minutes. Prints
a table and the rates of copies and products, and writes OUT.csv and OUT.json."""


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = parser().parse_args(argv)
    if arguments.command == "compress":
        for name in ("batch", "texts", "max_length"):
            if getattr(arguments, name) < 1:
                arguments.fail(f"--{name.replace('_', '-')} must be at least 1")
        from monarch_rocm import compress

        return compress.compress(arguments, Console(stderr=True))
    if arguments.command == "plan":
        return _plan(arguments)
    if arguments.command == "bench":
        return _bench(arguments)
    if arguments.command == "tune":
        return _tune(arguments)
    if arguments.command == "codegen":
        if arguments.write_budgets and (arguments.all or set(arguments.arch) != set(LDS)):
            arguments.fail("--write-budgets goes with the default layers on all architectures")
        return _codegen(arguments)
    found = doctor.facts()
    width = max(map(len, found))
    print("\n".join(f"{name:{width}}  {value}" for name, value in found.items()))
    return 0


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        prog="monarch-rocm",
        description=monarch_rocm.__doc__,
        epilog="monarch-rocm COMMAND --help says more of each command.",
    )
    parser.add_argument("--version", action="version", version=monarch_rocm.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    told = "print versions, devices, paths and what 'auto' picks, for a bug report"
    commands.add_parser("doctor", help=told, description=f"{told[0].upper()}{told[1:]}.")
    planning = commands.add_parser(
        "plan",
        help="reckon what a layer costs for several numbers of blocks; needs no GPU",
        description=PLAN,
        epilog="example: monarch-rocm plan 4096 14336 --tokens 8192 --device mi300x",
    )
    planning.add_argument("in_features", metavar="IN", type=int, help="input width of the layer")
    planning.add_argument("out_features", metavar="OUT", type=int, help="its output width")
    planning.add_argument(
        "--nblocks",
        metavar="N|K,L",
        nargs="+",
        type=_integers,
        help="a row each (powers of two up to 64 that neither cost more than nn.Linear nor leave zeros)",
    )
    planning.add_argument("--rank", metavar="R", type=int, help="as MonarchLinear's (its default)")
    planning.add_argument(
        "--layout", choices=LAYOUTS, default="interleaved", help="order of the outputs (interleaved)"
    )
    planning.add_argument("--tokens", metavar="T", type=int, default=8192, help="rows of the input (8192)")
    planning.add_argument(
        "--device",
        choices=tuple(estimate.DEVICES),
        default="h200",
        help="whose rates are taken (h200): measured for the H200, of data sheets for AMD's",
    )
    timing = commands.add_parser(
        "bench", help="time layers against nn.Linear and others on this GPU", description=BENCH
    )
    timing.add_argument(
        "--out", type=Path, default=Path("bench"), help="where to, without the ending (bench)"
    )
    timing.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of all tensors (bfloat16)")
    timing.add_argument("--kind", choices=bench.KINDS, help="only cases of this kind (all)")
    timing.add_argument("--rounds", metavar="N", type=int, default=30, help="runs of each competitor (30)")
    timing.add_argument("--compiled", action="store_true", help="also torch.compile of the einsum form")
    tuning = commands.add_parser(
        "tune",
        help="find the fastest kernel configs of your layers on this GPU",
        description=TUNE,
        epilog="example: monarch-rocm tune 4096 14336 --layer 14336,4096 --tokens 1 8192",
    )
    tuning.add_argument("in_features", metavar="IN", nargs="?", type=int, help="input width of a layer")
    tuning.add_argument("out_features", metavar="OUT", nargs="?", type=int, help="its output width")
    tuning.add_argument(
        "--layer",
        metavar="IN,OUT",
        dest="layers",
        action="append",
        default=[],
        type=_integers,
        help="another layer; may be given many times",
    )
    tuning.add_argument(
        "--nblocks", metavar="N|K,L", type=_integers, default=(4,), help="blocks of each factor (4)"
    )
    tuning.add_argument("--rank", metavar="R", type=int, help="as MonarchLinear's (its default)")
    tuning.add_argument(
        "--layout", choices=LAYOUTS, default="interleaved", help="order of the outputs (interleaved)"
    )
    tuning.add_argument(
        "--tokens",
        metavar="T",
        nargs="+",
        type=int,
        default=[1, 16, 1024, 8192],
        help="rows of the input, each rounded up to a power of two (1 16 1024 8192)",
    )
    tuning.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of input and factors (bfloat16)")
    tuning.add_argument("--train", action="store_true", help="tune the gradients too")
    tuning.add_argument(
        "--rounds", metavar="N", type=int, default=20, help="timed runs of each finalist (20)"
    )
    compiling = commands.add_parser(
        "codegen",
        help="compile the kernels for CDNA GPUs, with none at hand, and judge the code",
        description="Compile what layers launch for AMD's CDNA GPUs, print registers, spills, local memory "
        "and instructions of each kernel, and fail on what docs/amd.md lists. Nothing is run.",
    )
    compiling.set_defaults(fail=compiling.error)
    compiling.add_argument("--arch", nargs="+", choices=tuple(LDS), default=tuple(LDS), help="default: all")
    compiling.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there too")
    compiling.add_argument("--all", action="store_true", help="every shipped config, in some minutes")
    compiling.add_argument("--write-budgets", action="store_true", help="accept the code as it is now")
    compressing = commands.add_parser(
        "compress",
        help="compress a transformers model to a budget, fitted to texts, and save it",
        description=COMPRESS,
        epilog="example: monarch-rocm compress MODEL_DIR --budget 0.7 --calibration texts.txt --out DIR",
    )
    compressing.set_defaults(fail=compressing.error)
    compressing.add_argument("model", type=Path, metavar="MODEL_DIR", help="as save_pretrained writes it")
    compressing.add_argument("--budget", type=float, required=True, help="fraction that is left, such as 0.7")
    compressing.add_argument("--of", choices=COSTS, default="parameters", help="what is counted (parameters)")
    compressing.add_argument(
        "--calibration", type=Path, required=True, metavar="FILE", help="texts, one a line, UTF-8"
    )
    compressing.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the new model")
    compressing.add_argument(
        "--heal",
        type=int,
        default=0,
        metavar="STEPS",
        help="then train, to answer as before (0)",
    )
    compressing.add_argument("--lr", type=float, default=1e-3, help="learning rate of healing (0.001)")
    compressing.add_argument("--batch", type=int, default=32, help="texts at a time (32)")
    compressing.add_argument("--texts", type=int, default=1000, help="that factors are fitted to (1000)")
    compressing.add_argument("--max-length", type=int, default=128, help="of a text, in tokens (128)")
    compressing.add_argument("--device", help="cpu, cuda, ... (a GPU where there is one)")
    return parser


def _bench(arguments: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("monarch-rocm bench needs a ROCm or CUDA GPU, and PyTorch finds none", file=sys.stderr)
        return 1
    if arguments.rounds < 2:
        print(f"--rounds must be at least 2, but {arguments.rounds} was given", file=sys.stderr)
        return 2
    cases = [case for case in bench.CASES if arguments.kind in (None, case.kind)]
    dtype = getattr(torch, arguments.dtype)
    bench.bench(arguments.out, cases, dtype, arguments.rounds, arguments.compiled, Console())
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    rates = estimate.DEVICES[arguments.device]
    sizes, tokens = (arguments.in_features, arguments.out_features), arguments.tokens
    asked = arguments.nblocks or [(1,), (2,), (4,), (8,), (16,), (32,), (64,)]
    try:
        check_size("--tokens", tokens)
        estimates = [
            estimate.monarch(*sizes, _nblocks(given), arguments.rank, arguments.layout, tokens, rates)
            for given in asked
        ]
        if arguments.nblocks is None:
            estimates = [each for each in estimates if not each.notes]
        estimates.insert(0, estimate.dense(*sizes, tokens, rates))
    except ValueError as error:
        print(f"monarch-rocm plan: {error}", file=sys.stderr)
        return 2
    console = Console()
    console.print(estimate.table(estimates, tokens, rates))
    return 0


def _nblocks(given: tuple[int, ...]) -> int | tuple[int, ...]:
    return given[0] if len(given) == 1 else given


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number and no pair such as 4096,14336") from None


def _tune(arguments: argparse.Namespace) -> int:
    dtype, reason = getattr(torch, arguments.dtype), None
    if not torch.cuda.is_available():
        reason = "a ROCm or CUDA GPU, and PyTorch finds none"
    elif (state := dispatch.triton_state()[1]) is not None:
        reason = f"Triton, and {state}"
    if reason is not None:
        print(f"monarch-rocm tune needs {reason}", file=sys.stderr)
        return 1
    try:
        shapes = _shapes(arguments)
    except ValueError as error:
        print(f"monarch-rocm tune: {error}", file=sys.stderr)
        return 2
    from monarch_rocm import tune

    device = torch.device("cuda", torch.cuda.current_device())
    try:
        tune.tune(shapes, arguments.tokens, dtype, device, arguments.train, arguments.rounds, Console())
    except (OSError, torch.OutOfMemoryError) as error:
        print(f"monarch-rocm tune stopped, and kept what it had found: {error}", file=sys.stderr)
        return 1
    return 0


def _shapes(arguments: argparse.Namespace) -> list[MonarchShape]:
    """The layers that were asked for; a ValueError says what was given and what fits."""
    layers = list(arguments.layers)
    if arguments.in_features is not None:
        given = (arguments.in_features, arguments.out_features)
        layers.insert(0, tuple(size for size in given if size is not None))
    if not layers:
        raise ValueError("no layer was given: write IN OUT, or --layer IN,OUT for each")
    for layer in layers:
        if len(layer) != 2:
            raise ValueError(f"a layer has two sizes, IN and OUT, but {layer} was given")
    if arguments.rounds < 4:
        raise ValueError(f"--rounds must be at least 4, but {arguments.rounds} was given")
    if min(arguments.tokens) < 1:
        raise ValueError(f"--tokens must be at least 1, but {min(arguments.tokens)} was given")
    nblocks, rank, layout = _nblocks(arguments.nblocks), arguments.rank, arguments.layout
    return [MonarchShape(width, out, nblocks, rank, layout) for width, out in layers]


def _codegen(arguments: argparse.Namespace) -> int:
    from monarch_rocm.codegen import command, compiling

    reason = compiling.why_not()
    if reason is not None:
        print(f"monarch-rocm codegen needs Triton with its AMD backend: {reason}", file=sys.stderr)
        return 1
    archs = list(dict.fromkeys(arguments.arch))
    try:
        return command.codegen(archs, arguments.all, arguments.write_budgets, arguments.json)
    except RuntimeError as error:
        print(f"monarch-rocm codegen: {error}", file=sys.stderr)
        return 1
