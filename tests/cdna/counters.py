"""What a run did: instructions by class, LDS clocks and cache lines against the least possible.

Counts, not times.
"""

from collections import Counter

import numpy as np

from cdna import banks

LINE = 128


class Counters:
    def __init__(self, arch, detailed):
        """`detailed` also follows banks and cache lines, which takes several times as long."""
        self.banks = 64 if arch == "gfx950" else 32
        self.detailed = detailed
        self.instructions = Counter()
        self.lds_clocks = self.lds_least = self.lines = self.lines_least = 0

    def execute(self, ins, waves):
        self.instructions[ins.kind] += waves

    def lds(self, address, live, size):
        if self.detailed and live.any():
            clocks, least = banks.clocks(address, live, size, self.banks)
            self.lds_clocks += clocks
            self.lds_least += least

    def memory(self, offset, live, size):
        if self.detailed:
            ends = (offset[:, :, None] + np.array([0, size - 1])).reshape(len(offset), -1) // LINE
            ends = np.sort(np.where(np.repeat(live, 2, axis=1), ends, -1), axis=1)
            self.lines += int((ends[:, 0] >= 0).sum() + (ends[:, 1:] != ends[:, :-1]).sum())
            self.lines_least += int((-(-live.sum(1) * size // LINE)).sum())

    def conflict_factor(self):
        """LDS clocks over the least possible; 1 where LDS was not used."""
        return self.lds_clocks / self.lds_least if self.lds_least else 1.0

    def line_factor(self):
        """Cache lines touched over the least possible."""
        return self.lines / self.lines_least if self.lines_least else 1.0
