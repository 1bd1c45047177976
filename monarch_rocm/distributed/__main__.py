"""`python -m monarch_rocm.distributed ADDRESS`: offer this machine to a `Fleet.attach` elsewhere."""

from __future__ import annotations

import argparse

import torch  # noqa: F401, before torchmonarch, as ROCm needs it


def main() -> None:
    """Serve until the controller ends this, or somebody does."""
    parser = argparse.ArgumentParser(prog="python -m monarch_rocm.distributed", description=__doc__)
    parser.add_argument("address", help="tcp://host:port to listen at; who reaches it can run code")
    address = parser.parse_args().address
    from monarch_rocm.distributed.fleet import engine

    engine().run_worker_loop_forever(ca="trust_all_connections", address=address)


if __name__ == "__main__":
    main()
