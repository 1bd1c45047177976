"""Configs for CDNA from compiled code: `model` says how, `__main__` does it. Nothing runs on a GPU."""
