"""In which order the programs of a launch take their tiles, on GPUs that have several L2 caches.

MI300 and MI350 deal workgroups out over their chiplets (XCDs) in turn, workgroup w to chiplet
w % XCDS, and each chiplet has an L2 of its own. Neighbouring programs share tiles, which they then
fetch into as many caches. So here a chiplet takes a run of neighbours, and within a run tiles of
tokens come in groups, so that those in flight share both their inputs and their weights.

Every order is a permutation for every number of programs and of chiplets: a wrong count costs
locality, never a result. With one chiplet nothing is compiled that was not there before.
"""

import triton
import triton.language as tl

TOGETHER = tl.constexpr(8)  # rows of a group: of 2, 4, 8 and 16 the one that fetched least (docs/amd.md)


@triton.jit
def on_chiplet(pid, programs, XCDS: tl.constexpr):
    """The place of workgroup `pid` where each chiplet's places are one run."""
    chiplet = pid % XCDS
    return chiplet * (programs // XCDS) + min(chiplet, programs % XCDS) + pid // XCDS


@triton.jit
def in_groups(place, rows, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """(row, column) of a place where groups of GROUP rows are walked column by column.

    Rows that are left after the last group are walked one by one: a group of any height would need a
    division by a number that is known late, which takes a hundred instructions.
    """
    grouped = place < rows // GROUP * (GROUP * COLUMNS)
    row = place // (GROUP * COLUMNS) * GROUP + place % GROUP if grouped else place // COLUMNS
    column = place % (GROUP * COLUMNS) // GROUP if grouped else place % COLUMNS
    return row, column


@triton.jit
def place_of_program(XCDS: tl.constexpr):
    """The place of the program that asks."""
    if XCDS == 1:
        return tl.program_id(0)
    else:
        # Unsigned, since that halves the instructions of each division.
        pid, programs = tl.program_id(0).to(tl.uint32), tl.num_programs(0).to(tl.uint32)
        return on_chiplet(pid, programs, XCDS).to(tl.int32)


@triton.jit
def tile_of_program(COLUMNS: tl.constexpr, XCDS: tl.constexpr):
    """Its (row, column), where a launch has COLUMNS programs for each row."""
    rows = tl.num_programs(0).to(tl.uint32) // COLUMNS
    row, column = in_groups(place_of_program(XCDS).to(tl.uint32), rows, COLUMNS, TOGETHER)
    return row.to(tl.int32), column.to(tl.int32)
