"""All waves of a launch, one instruction at a time.

Waves that stand at the same instruction execute it together, those furthest behind first.
"""

from functools import cached_property

import numpy as np

from cdna import across, ds, matrix, packed, scalar, vector, vmem
from cdna.bits import LANES, EmulationError
from cdna.counters import Counters
from cdna.lds import Lds
from cdna.registers import Registers

LIMIT = 1_000_000  # instructions after which a loop is taken for endless


def decode(ins):
    """The function `(machine, waves)` that executes an instruction, by any of the families."""
    if ins.opcode.startswith("s_"):
        return scalar.decode(ins)
    if ins.opcode.startswith("v_mfma_"):
        return matrix.decode(ins)
    if ins.opcode.startswith("ds_"):
        return ds.decode(ins)
    if ins.opcode.startswith(("buffer_", "global_")):
        return vmem.decode(ins)
    for family in (vector, packed, across):
        if step := family.decode(ins):
            return step
    raise ins.unknown()


class Machine:
    def __init__(self, program, heap, workgroups, waves_per_group, lds_size, detailed=False):
        self.program, self.heap = program, heap
        self.waves, self.waves_per_group = workgroups * waves_per_group, waves_per_group
        self.workgroup = np.arange(self.waves) // waves_per_group
        self.registers = Registers(self.waves)
        self.lds = Lds(self, workgroups, lds_size, ds.smallest_access(program))
        self.counters = Counters(program.arch, detailed)
        self.counter = np.zeros(self.waves, np.int64)
        self.finished = np.zeros(self.waves, bool)
        self.arrived = np.zeros(self.waves, bool)

    @cached_property
    def steps(self):
        return [decode(ins) for ins in self.program.instructions]

    def start(self, arguments):
        """Fill the registers as the hardware does for a kernel whose arguments lie at that address."""
        directives, r = self.program.directives, self.registers
        first = 0
        for name, count in (("private_segment_buffer", 4), ("dispatch_ptr", 2), ("queue_ptr", 2)):
            first += count if directives.get(f"user_sgpr_{name}") else 0
        r.scalar_file[first], r.scalar_file[first + 1] = arguments & 0xFFFFFFFF, arguments >> 32
        identity = directives["user_sgpr_count"]
        for axis, number in (("x", self.workgroup), ("y", 0), ("z", 0)):
            if directives.get(f"system_sgpr_workgroup_id_{axis}"):
                r.scalar_file[identity] = number
                identity += 1
        r.vector_file[0] = (np.arange(self.waves) % self.waves_per_group * 64)[:, None] + LANES

    def run(self):
        with np.errstate(all="ignore"):
            for _ in range(LIMIT):
                ready = ~self.finished & ~self.arrived
                if ready.any():
                    self._step(ready)
                elif self.finished.all():
                    return
                else:
                    self._release()
        raise EmulationError(f"still running after {LIMIT} instructions")

    def _step(self, ready):
        position = self.counter[ready].min()
        chosen = ready & (self.counter == position)
        g = slice(None) if chosen.all() else np.nonzero(chosen)[0]
        ins = self.program.instructions[position]
        self.counters.execute(ins, self.registers.count(g))
        self.counter[g] = position + 1
        self.registers.all_active = bool(self.registers.active[g].all())
        self.registers.waits.instruction = ins.text
        self.steps[position](self, g)

    def finish(self, g):
        self.finished[g] = True

    def arrive(self, g):
        """At a barrier."""
        self.registers.waits.publish(g)
        self.arrived[g] = True

    def _release(self):
        """Let the workgroups go on whose waves have all arrived, or finished."""
        arrived = self.arrived.reshape(-1, self.waves_per_group)
        finished = self.finished.reshape(-1, self.waves_per_group)
        whole = (arrived | finished).all(1) & arrived.any(1)
        if not whole.any():
            raise EmulationError("waves wait at a barrier that others never reach")
        self.arrived[np.repeat(whole, self.waves_per_group)] = False
        self.lds.epoch[whole] += 1
