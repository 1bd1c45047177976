"""Which configs of a kernel are worth a measurement: `configs/space.json`, multiplied out."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from typing import Any

from monarch_rocm.kernels import tuning

SPACE = tuning.CONFIGS / "space.json"
PLAIN = {"waves_per_eu": 0, "kpack": 1}  # Triton's own defaults, which a config need not name


@cache
def candidates(kernel: str, rocm: bool) -> tuple[dict[str, int], ...]:
    """All configs of the search space, each once, whether or not they fit a shape.

    An entry of the file is `{"configs": [{parameter: [values]}], "rocm": {parameter: [values]},
    "knobs": [{option: [values]}]}`: every way to take one value of each parameter is a config. What
    "rocm" lists replaces values or adds options there, and only there; `variants` says what "knobs" are.

    Raises:
        LookupError: the file has no entry for `kernel`.
        ValueError: an entry of another form, or a config that the kernel cannot take.
    """
    entry = _entry(kernel)
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


def rounds(kernel: str) -> int:
    """How many times `variants` may be asked for a kernel, each time about the best found so far."""
    return len(_entry(kernel)["knobs"])


def variants(kernel: str, number: int, config: dict[str, int], arch: str) -> list[dict[str, int]]:
    """The other values of AMD's compiler options in round `number`, tried about one config.

    They multiply a search of all configs, so they are left to the few that are worth it. gfx950 has no
    `kpack`: Triton takes 1 there, whatever is asked, and warns.
    """
    knobs = _entry(kernel)["knobs"][number]
    found = []
    for values in product(*knobs.values()):
        other = config | dict(zip(knobs, values, strict=True))
        if arch == "gfx950":
            other.pop("kpack", None)
        other = {name: value for name, value in other.items() if PLAIN.get(name) != value}
        tuning.check_config(other, kernel)
        if other != config and other not in found:
            found.append(other)
    return found


def _entry(kernel: str) -> dict[str, Any]:
    space = json.loads(SPACE.read_text(encoding="utf-8"))
    if kernel not in space:
        raise LookupError(f"{SPACE} has no entry for the kernel {kernel!r}: it has {sorted(space)}")
    entry = space[kernel]
    if not isinstance(entry, dict) or set(entry) != {"configs", "rocm", "knobs"}:
        raise ValueError(
            f'{SPACE}: the entry of {kernel} must be {{"configs": [...], "rocm": {{...}}, "knobs": [...]}}'
        )
    return entry
