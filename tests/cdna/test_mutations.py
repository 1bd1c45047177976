"""Faults put into compiled kernels on purpose: evidence that the interpreter would see real ones."""

import pytest
import torch
from support import dtype_id

from cdna.backend import ARCHS

pytest.importorskip("triton", minversion="3.4")
from cdna.mutations import (
    DTYPES,
    stage,
    subject,
    too_many_tokens,
    weaker_waits,
    weight_gradient,
    without,
)
from monarch_rocm.kernels import chained, interleave

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="launches are taken from Triton's interpreter"),
]
by_arch = pytest.mark.parametrize("arch", ARCHS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
by_kernel = pytest.mark.parametrize("make", [stage, weight_gradient])


def outcomes(found, mutants):
    """What became of every mutant, of which there must be some, by the position of the fault."""
    results = {position: found.outcome(program) for position, program in mutants}
    assert results
    return results


def first_write(program):
    """The position of what first writes LDS."""
    return min(i for i, ins in enumerate(program.instructions) if ins.kind in ("lds_write", "async"))


@by_arch
@by_dtype
@by_kernel
@pytest.mark.parametrize("stages", [1, 2])
def test_a_removed_barrier_is_a_race(make, arch, dtype, stages):
    """Every one but those that stand before the first access to LDS, where there is nothing to guard."""
    found = make(arch, dtype, stages)
    assert found.outcome() == "right"
    first = first_write(found.program)
    for position, result in outcomes(found, without(found.program, "s_barrier")).items():
        assert position < first or "LDS race" in result, (position, result)


def assert_waits_are_seen(found, mutants):
    """All but a few that the compiler writes without need.

    In front of a barrier it waits for all reads, also for those of a tile that nobody overwrites next,
    and the prologue for old firmware ends with a wait and a branch.
    """
    results = outcomes(found, mutants)
    unneeded = [position for position, result in results.items() if result == "right"]
    for position, result in results.items():
        if position in unneeded:
            assert found.program.instructions[position + 1].opcode in ("s_barrier", "s_branch")
        else:
            assert "wait" in result, (position, result)
    assert 4 * len(unneeded) <= len(results)


@by_arch
@by_dtype
@by_kernel
def test_a_removed_wait_is_seen(make, arch, dtype):
    """Loads into registers, copies into LDS, and LDS between waves, in a loop with two buffers."""
    found = make(arch, dtype, 2)
    assert found.outcome() == "right"
    for counter in ("vmcnt", "lgkmcnt"):
        assert_waits_are_seen(found, weaker_waits(found.program, counter, None))


@by_arch
@by_kernel
def test_a_wait_that_leaves_one_more_is_seen(make, arch):
    """Four in five at least: the compiler may wait for more than it must."""
    found = make(arch, torch.bfloat16, 2)
    for counter in ("vmcnt", "lgkmcnt"):
        results = outcomes(found, weaker_waits(found.program, counter, 1)).values()
        assert sum("wait" in result for result in results) >= 0.8 * len(results)


@by_arch
@by_dtype
@by_kernel
def test_a_dropped_product_is_wrong(make, arch, dtype):
    found = make(arch, dtype, 2)
    assert set(outcomes(found, without(found.program, "v_mfma")).values()) == {"wrong"}


@by_arch
@by_dtype
@by_kernel
@pytest.mark.parametrize("more", [1, 64])
def test_too_many_tokens_leave_the_tensor(make, arch, dtype, more):
    """A bound that is too large by one row is enough."""
    assert "outside the tensors" in too_many_tokens(make(arch, dtype, 2), more)


@by_arch
def test_a_transpose_without_a_store_or_a_barrier(arch):
    """A store that is dropped leaves what was there before."""
    x = torch.randn(20, 31 * 15)
    config = {"BT": 4, "BR": 32, "BC": 16, "num_warps": 4, "num_stages": 1}
    found = subject(arch, lambda: interleave.interleave(x, 31, 15, 31 * 15, None, config), "y")
    assert found.outcome() == "right"
    assert set(outcomes(found, without(found.program, "(buffer|global)_store")).values()) == {"wrong"}
    assert all(
        "LDS race" in result for result in outcomes(found, without(found.program, "s_barrier")).values()
    )


@by_dtype
def test_a_loop_that_is_come_to_again(dtype):
    """Three steps in two buffers end where the next tile begins, whose copies must not overtake the reads.

    Triton before 3.9 leaves out the barrier in front of copies, which `launch.options` therefore forbids.
    """
    tile = 128 // dtype.itemsize
    x, w1, w2 = (torch.randn(size).to(dtype) for size in ((64, 6 * tile), (2, 96, 3 * tile), (3, 64, 64)))
    config = {"BT": 64, "BO": 32, "BI": tile, "PROGRAMS": 1, "num_warps": 4, "num_stages": 2}
    found = subject("gfx950", lambda: chained.chained(x, w1, w2, None, 192, config), "y")
    assert found.outcome() == "right"
    first = first_write(found.program)
    guard = max(position for position in found.program.find("s_barrier") if position < first)
    result = found.outcome(found.program.replaced(guard, "s_nop 0"))
    assert "LDS race, a write to what another wave read" in result
