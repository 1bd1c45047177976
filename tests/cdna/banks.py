"""How many clocks the LDS needs for one access: banks, and the groups of lanes that it serves together.

64 banks of 4 bytes on gfx950, 32 elsewhere. A group of lanes takes as many clocks as the busiest bank
has different words. The groups of 16-byte accesses are not contiguous, as AMD has published.
"""

import numpy as np


def groups(size, banks):
    """The lanes that are served together, for accesses of that many bytes."""
    if size in (12, 16):
        quads = [(0, 20), (4, 16), (8, 28), (12, 24)]
        lanes = [np.concatenate([np.arange(first, first + 4) for first in pair]) for pair in quads]
        if banks == 64:
            lanes = [np.concatenate([lanes[0], lanes[3]]), np.concatenate([lanes[1], lanes[2]])]
        return lanes + [group + 32 for group in lanes]
    count = (16 if size == 8 else 32) * (2 if banks == 64 else 1)
    return [np.arange(first, first + count) for first in range(0, 64, count)]


def clocks(address, live, size, banks):
    """(clocks, the least possible) of the accesses of several waves."""
    total, count = 0, max(1, size // 4)
    parts = groups(size, banks)
    for lanes in parts:
        words = (address[:, lanes, None] // 4 + np.arange(count)).reshape(len(address), -1)
        words = np.sort(np.where(np.repeat(live[:, lanes], count, axis=1), words, -1), axis=1)
        different = words >= 0
        different[:, 1:] &= words[:, 1:] != words[:, :-1]
        wave, at = np.nonzero(different)
        load = np.bincount(wave * banks + words[wave, at] % banks, minlength=len(address) * banks)
        total += int(load.reshape(-1, banks).max(1).sum())
    return total, len(address) * len(parts)
