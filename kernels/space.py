"""Which configs of a kernel are worth a measurement: `configs/space.json`, multiplied out."""

from __future__ import annotations

import json
from functools import cache
from itertools import product

from monarch_rocm.kernels import tuning

SPACE = tuning.CONFIGS / "space.json"


@cache
def candidates(kernel: str, rocm: bool) -> tuple[dict[str, int], ...]:
    """All configs of the search space, each once, whether or not they fit a shape.

    An entry of the file is `{"configs": [{parameter: [values]}], "rocm": {parameter: [values]}}`:
    every way to take one value of each parameter is a config. What "rocm" lists replaces values or
    adds options there, and only there.

    Raises:
        LookupError: the file has no entry for `kernel`.
        ValueError: an entry of another form, or a config that the kernel cannot take.
    """
    space = json.loads(SPACE.read_text(encoding="utf-8"))
    if kernel not in space:
        raise LookupError(f"{SPACE} has no entry for the kernel {kernel!r}: it has {sorted(space)}")
    entry = space[kernel]
    if not isinstance(entry, dict) or set(entry) != {"configs", "rocm"}:
        raise ValueError(f'{SPACE}: the entry of {kernel} must be {{"configs": [...], "rocm": {{...}}}}')
    found = []
    for choices in entry["configs"]:
        choices = choices | (entry["rocm"] if rocm else {})
        for values in product(*choices.values()):
            config = dict(zip(choices, values, strict=True))
            tuning.check_config(config, kernel)
            if not rocm and tuning.AMD_OPTIONS & set(config):
                raise ValueError(f"{SPACE}: {sorted(tuning.AMD_OPTIONS)} of {kernel} belong under rocm")
            if config not in found:
                found.append(config)
    return tuple(found)
