"""The cause is told, not what it brought about: the judge on made-up evidence."""

from monarch_rocm.distributed.attempt import Attempt, _crashed
from monarch_rocm.distributed.judge import Evidence, Failure

PEER = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


def failure(rank, error, phase="train", step=7):
    return Failure(rank, phase, step, error, "Traceback ...")


def test_a_dead_worker_goes_before_what_its_peers_say():
    evidence = Evidence(failures=[failure(0, PEER)], steps={1: 6})
    assert evidence.known() is None  # not yet: who has gone is not known
    evidence.dead[1] = "killed by signal 9"
    assert (evidence.known().rank, evidence.known().step) == (1, 7)
    assert str(evidence.known()) == "rank 1 died at step 7: killed by signal 9"


def test_an_exception_goes_before_what_its_peers_say():
    evidence = Evidence(failures=[failure(0, PEER), failure(2, "ValueError: bad batch")])
    assert str(evidence.known()) == "rank 2 failed at step 7: ValueError: bad batch"
    assert evidence.known().traceback


def test_where_nothing_better_comes_the_first_word_counts():
    assert Evidence(failures=[failure(3, PEER)]).best().rank == 3
    assert Evidence().best().rank is None


def test_an_error_in_build_is_final():
    assert Evidence(failures=[failure(0, "KeyError: 'lr'", "build", None)]).known().final
    assert not Evidence(failures=[failure(0, "KeyError: 'lr'")]).known().final


WAITING = 'File "/x/train.py", line 3, in step\n File "/v/torch/autograd/graph.py", line 8, in run\n'
SLEEPING = 'File "/v/torch/nn/module.py", line 1, in call\n File "/x/data.py", line 9, in read\n    read()\n'


def test_of_ranks_that_wait_for_each_other_the_one_outside_pytorch_hangs():
    evidence = Evidence(stacks={0: WAITING, 1: SLEEPING}, steps={0: 4, 1: 4})
    cause = evidence.hang([0, 1], 20)
    assert (cause.rank, cause.step) == (1, 4)
    assert 'no progress for 20 s, in "/x/data.py", line 9' in cause.text


def test_a_process_that_does_not_run_says_nothing():
    cause = Evidence(stacks={1: WAITING}, steps={0: 4, 1: 4}).hang([0, 1], 20)
    assert cause.rank == 0
    assert "does not run" in cause.text


def test_if_all_wait_the_last_one_behind_is_named():
    assert Evidence(stacks={0: WAITING, 1: WAITING}, steps={0: 5, 1: 4}).hang([0, 1], 1).rank == 1


def test_what_the_runtime_says_of_a_process():
    """Its text names the place in the mesh and the end."""
    text = "Supervision event: actor logger-x{'procs': 1/2} failed:\n the process failed: Killed(sig=9))"
    assert _crashed(text, 2) == [(1, "killed by signal 9")]
    text = text.replace("'procs': 1/2", "'hosts': 1/2, 'procs': 0/2")
    assert _crashed(text, 4) == [(2, "killed by signal 9")]
    assert _crashed("something else", 2) == []


def test_silence_of_one_rank_is_a_stall():
    """Also where the others go on."""
    attempt = Attempt(0, None, 2, ("here", "", ""))
    assert attempt.cause(30, 60) is None
    attempt._heard[1] -= 31
    assert attempt.cause(30, 60) is None  # it still starts
    attempt.hear("steps", 1, [(0, {}, 0.1)])
    attempt._heard[1] -= 31
    assert attempt.cause(30, 60).rank == 1
    attempt.done.add(1)
    assert attempt.cause(30, 60) is None


def test_a_rank_whose_last_word_came_later_may_be_the_one_that_hangs():
    """Its peers wait for it, and their words may have come a moment before its own."""
    attempt = Attempt(0, None, 2, ("here", "", ""))
    for rank, stack, seconds in ((0, WAITING, 30.1), (1, SLEEPING, 29.9)):
        attempt.hear("steps", rank, [(0, {}, 0.1)])
        attempt.hear("stack", rank, stack)
        attempt._heard[rank] -= seconds
    assert attempt.cause(30, 60).rank == 1
    attempt._heard[1] += 5  # it goes on
    assert attempt.cause(30, 60).rank == 0


def test_a_failure_waits_for_what_other_ranks_have_to_tell():
    """Steps before it that are on their way, from ranks that may still speak, and not for ever."""
    attempt = Attempt(0, None, 3, ("here", "", ""))
    attempt.hear("steps", 1, [(step, {}, 0.1) for step in range(7)])
    attempt.hear("failed", 1, failure(1, "ValueError: bad batch"))
    attempt.hear("steps", 0, [(step, {}, 0.1) for step in range(7)])
    attempt.hear("steps", 2, [(0, {}, 0.1)])
    assert attempt.cause(30, 60) is None
    attempt.hear("steps", 2, [(step, {}, 0.1) for step in range(1, 7)])
    assert attempt.cause(30, 60).text == "rank 1 failed at step 7: ValueError: bad batch"
    assert attempt.complete() == list(range(7))
    attempt.evidence.steps[2] = 3  # as if it never came
    attempt._failed_at -= 1
    assert attempt.cause(30, 60).rank == 1


def test_a_script_that_dies_is_given_no_step():
    """It tells of none."""
    attempt = Attempt(0, None, 2, ("here", "", ""))
    for rank in (0, 1):
        attempt.hear("phase", rank, "script")
        attempt.hear("start", rank, None, [])
    assert attempt.started
    attempt.evidence.dead[1] = "killed by signal 9"
    cause = attempt.cause(30, 60)
    assert (cause.rank, cause.step, cause.text) == (1, None, "rank 1 died in script: killed by signal 9")
