"""CDNA machine code executed without an AMD GPU: evidence, and what it is not.

`machine.launch` takes the assembly text that Triton compiles for gfx90a, gfx942 or gfx950 and executes
it on numpy arrays, all waves of a grid together. It raises on

* an opcode, a modifier or an operand that it does not know, by name;
* an access outside a tensor's elements, or misaligned (`heap`), or outside a workgroup's LDS (`lds`);
* a workgroup touching what another has written in the same launch, or a wave reading what another
  wave has written with no barrier between (`heap`);
* LDS written by one wave and touched by another with no barrier between (`lds`);
* a register used before the load that fills it was waited for, LDS read before the copy or the other
  wave's write that fills it was waited for, or written before another wave's read was (`waits`, `lds`).

It counts instructions by class, LDS clocks against the least possible, and cache lines touched against
the least possible (`counters`).

Limits. It was written from AMD's public ISA documents and never compared with silicon: a misreading of
a document would be shared by the interpreter and its tests. Supported only by agreement with numpy are
the lane layouts of `ds_read_b64_tr_b16`, of the permlane swaps and of copies straight into LDS. Not
modelled are

* time: nothing here is a measurement of speed;
* caches and their coherence (the bits sc0, sc1, nt and glc, and writeback and invalidate);
* hazards that the assembler's `s_nop` covers, between matrix and vector instructions for one;
* denormal and rounding modes, exceptions, and the last bits of exp, log, rcp, rsq, sqrt and of the sums
  inside one matrix instruction;
* the order of workgroups, and any interleaving of waves but the one that runs them in lock-step: a race
  is seen where the bookkeeping of barriers and waits sees it;
* arguments that hardware puts into registers before a kernel starts: the prologue that loads them runs;
* scratch memory (a kernel that spills raises), atomics, 8-bit floats, more than one grid axis;
* the driver and the launcher: how a real ROCm loads the code and passes arguments.
"""
