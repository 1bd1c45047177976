"""The command `monarch-rocm`."""

from __future__ import annotations

import argparse

import monarch_rocm
from monarch_rocm import doctor


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="monarch-rocm", description=monarch_rocm.__doc__)
    parser.add_argument("--version", action="version", version=monarch_rocm.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor", help="print versions, devices, paths and what 'auto' picks, for a bug report"
    )
    parser.parse_args(argv)
    found = doctor.facts()
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:{width}}  {value}")
    return 0
