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
            for wave, used in zip(offset, live, strict=True):
                bytes_touched = wave[used][:, None] + np.array([0, size - 1])
                self.lines += len(np.unique(bytes_touched // LINE))
                self.lines_least += -(-len(wave[used]) * size // LINE)

    def conflict_factor(self):
        """LDS clocks over the least possible; 1 where LDS was not used."""
        return self.lds_clocks / self.lds_least if self.lds_least else 1.0

    def line_factor(self):
        """Cache lines touched over the least possible."""
        return self.lines / self.lines_least if self.lines_least else 1.0
