"""The command `monarch-rocm`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console

import monarch_rocm
from monarch_rocm import doctor
from monarch_rocm.codegen.assembly import LDS


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="monarch-rocm", description=monarch_rocm.__doc__)
    parser.add_argument("--version", action="version", version=monarch_rocm.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor", help="print versions, devices, paths and what 'auto' picks, for a bug report"
    )
    timing = commands.add_parser("bench", help="time layers against nn.Linear and others on this GPU")
    timing.add_argument("--out", type=Path, default=Path("bench"), help="results, without the ending")
    timing.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    timing.add_argument("--kind", choices=("forward", "train", "decode"), help="only cases of this kind")
    timing.add_argument("--rounds", type=int, default=30, help="runs of each competitor")
    timing.add_argument("--compiled", action="store_true", help="also torch.compile of the einsum form")
    compiling = commands.add_parser(
        "codegen", help="compile the kernels for CDNA GPUs, with none at hand, and judge the code"
    )
    compiling.add_argument("--arch", nargs="+", choices=tuple(LDS), default=tuple(LDS), help="default: all")
    compiling.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there too")
    compiling.add_argument("--all", action="store_true", help="every shipped config, in some minutes")
    compiling.add_argument("--write-budgets", action="store_true", help="accept the code as it is now")
    arguments = parser.parse_args(argv)
    if arguments.command == "bench":
        return _bench(arguments)
    if arguments.command == "codegen":
        if arguments.write_budgets and (arguments.all or set(arguments.arch) != set(LDS)):
            compiling.error("--write-budgets goes with the default layers on all architectures")
        return _codegen(arguments)
    found = doctor.facts()
    width = max(map(len, found))
    print("\n".join(f"{name:{width}}  {value}" for name, value in found.items()))
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("monarch-rocm bench needs a ROCm or CUDA GPU, and PyTorch finds none", file=sys.stderr)
        return 1
    from monarch_rocm import bench

    if arguments.rounds < 2:
        print(f"--rounds must be at least 2, but {arguments.rounds} was given", file=sys.stderr)
        return 2
    cases = [case for case in bench.CASES if arguments.kind in (None, case.kind)]
    dtype = getattr(torch, arguments.dtype)
    bench.bench(arguments.out, cases, dtype, arguments.rounds, arguments.compiled, Console())
    return 0


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
