"""Which loads and copies are still on their way: the counters that `s_waitcnt` waits for.

`vmcnt` counts what goes to memory, `lgkmcnt` what goes to LDS or reads constants. Both come back in
order, but for constants, of which only `lgkmcnt(0)` knows anything.

`vmcnt` has 6 bits: a wave that has 63 on their way issues no other before one is back. Triton 3.6's code
leaves waits out that this makes needless.
"""

import numpy as np

from cdna.bits import EmulationError

MOST = 63  # that `vmcnt` can count


class Waits:
    def __init__(self, waves):
        self.issued = {name: np.zeros(waves, np.int64) for name in ("vmcnt", "lgkmcnt")}
        self.done = {name: np.zeros(waves, np.int64) for name in ("vmcnt", "lgkmcnt")}
        # What was done when a wave came to its last barrier: all that other waves can know of it.
        self.known = {name: np.zeros(waves, np.int64) for name in ("vmcnt", "lgkmcnt")}
        self.last_constant = np.zeros(waves, np.int64)
        self.pending = {}
        self.instruction = ""

    def issue(self, counter, g, constant=False):
        """Count one more operation."""
        self.issued[counter][g] += 1
        if counter == "vmcnt":
            self.done[counter][g] = np.maximum(self.done[counter][g], self.issued[counter][g] - MOST)
        if constant:
            self.last_constant[g] = self.issued[counter][g]

    def expect(self, file, index, g, counter):
        """The newest operation will write that register."""
        sequence = self.pending.setdefault((file, index, counter), np.zeros_like(self.last_constant))
        sequence[g] = self.issued[counter][g]

    def check(self, file, index, g):
        """Raise where the register is still to be written by a load."""
        if not self.pending:
            return
        for counter in ("vmcnt", "lgkmcnt"):
            sequence = self.pending.get((file, index, counter))
            if sequence is not None and (sequence[g] > self.done[counter][g]).any():
                raise EmulationError(
                    f"{file}{index} is used before the load that fills it was waited for ({counter}): "
                    f"{self.instruction}"
                )

    def publish(self, g):
        """At a barrier."""
        for counter, done in self.done.items():
            self.known[counter][g] = done[g]

    def wait(self, counter, left, g):
        """Until at most `left` operations are on their way."""
        done = np.maximum(self.done[counter][g], self.issued[counter][g] - left)
        if counter == "lgkmcnt" and left:
            # Constants come back in any order, so that a count says nothing while one is on its way.
            done = np.where(self.last_constant[g] > self.done[counter][g], self.done[counter][g], done)
        self.done[counter][g] = done
        settled = [
            key
            for key, sequence in self.pending.items()
            if key[2] == counter and (sequence <= self.done[counter]).all()
        ]
        for key in settled:
            del self.pending[key]
