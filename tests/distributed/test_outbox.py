"""What a worker tells: in order, in few messages, nothing left unsaid but by a process that is killed."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from monarch_rocm.distributed.loop import Seat, Teller, work
from monarch_rocm.distributed.mark import Mark, MarkOf
from monarch_rocm.distributed.outbox import EVERY, Outbox


@pytest.fixture
def outbox():
    """An outbox and the messages that have left it."""
    sent = []
    box = Outbox(sent.append)
    yield box, sent
    box.close()


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_records_leave_in_order_and_in_few_messages(outbox):
    """The first at once, the others together, though the loop that tells them does nothing for it."""
    box, sent = outbox
    began = time.monotonic()
    box.put(0, {"loss": 1.0}, 0.1)
    wait_for(lambda: sent)
    for step in range(1, 500):
        box.put(step, {"loss": 1.0 / step}, 0.1)
    wait_for(lambda: sum(map(len, sent)) == 500)
    assert [told for message in sent for told in message] == [
        (step, {"loss": 1.0 / max(step, 1)}, 0.1) for step in range(500)
    ]
    assert len(sent[0]) == 1
    assert len(sent) <= 2 + (time.monotonic() - began) / EVERY


def test_flush_leaves_nothing(outbox):
    box, sent = outbox
    for step in range(100):
        box.put(step, {}, 0.1)
    box.flush()
    assert [step for message in sent for step, *_ in message] == list(range(100))


def test_a_metric_is_what_it_was_at_the_end_of_its_step(outbox):
    """Not what a running sum has become when it is sent."""
    box, sent = outbox
    total, metrics = torch.zeros(()), {}
    for step in range(20):
        total += 1
        metrics["total"] = total
        box.put(step, metrics, 0.1)
    box.flush()
    assert [told["total"] for message in sent for _, told, _ in message] == list(range(1, 21))
    with pytest.raises(TypeError, match=r"metric 'x' must be one number, but it is a tensor \(3,\)"):
        box.put(20, {"x": torch.ones(3)}, 0.1)


class Event:
    """A GPU's, at which it arrives when it is told to."""

    def __init__(self):
        self.over = False

    def query(self):
        if isinstance(self.over, Exception):
            raise self.over
        return self.over


def test_numbers_of_a_gpu_are_waited_for_in_order(outbox):
    """By the thread and by `flush`, neither holds the other up; an error of the GPU comes to the loop."""
    box, sent = outbox
    event, late = Event(), Event()
    box._waiting += [(0, {"loss": torch.tensor(0.5)}, 0.1, event), (1, {}, 0.1, None), (2, {}, 0.1, late)]
    box.flush(0.05)
    assert sent == []
    event.over = True
    box.flush(0.05)
    assert sent == [[(0, {"loss": 0.5}, 0.1), (1, {}, 0.1)]]
    late.over = RuntimeError("device-side assert")
    with pytest.raises(RuntimeError, match="device-side assert"):
        box.flush()
    with pytest.raises(RuntimeError, match="device-side assert"):
        box.put(3, {}, 0.1)


@pytest.mark.gpu
def test_metrics_on_a_gpu_hold_up_no_step(outbox):
    """The loop runs ahead of the GPU; the numbers come when they are there."""
    box, sent = outbox
    x = torch.ones((), device="cuda")
    box.put(0, {"x": x}, 0.1)
    box.flush()
    for step in range(1, 5):
        torch.cuda._sleep(200_000_000)  # some 0.1 s
        x = x + 1
        box.put(step, {"x": x}, 0.1)
    end = torch.cuda.Event()
    end.record()
    assert not end.query()
    box.flush()
    assert [told["x"] for message in sent for _, told, _ in message] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_what_cannot_be_sent_is_an_error_of_the_loop():
    def send(told):
        raise TypeError("cannot pickle")

    box = Outbox(send)
    box.put(0, {"lock": threading.Lock()}, 0.1)
    with pytest.raises(TypeError, match="cannot pickle"):
        box.flush()
    with pytest.raises(TypeError, match="cannot pickle"):
        box.put(1, {}, 0.1)
    box.close()


def test_every_other_word_comes_after_the_steps_before_it():
    """A checkpoint's, an error's, the end's: what waits goes first."""
    told = []
    teller = Teller(1, 0, told.append, 60, Mark())
    ends = (lambda: teller.phase("save"), lambda: teller.failed(ValueError("bad")), teller.done)
    for first, end in zip((0, 10, 20), ends, strict=True):
        for step in range(first, first + 10):
            teller.step(step)
            teller.metrics(step, {"loss": 0.5})
        end()
    teller.stop()
    order = []
    for kind, _, _, *words in told:
        order += [step for step, *_ in words[0]] if kind == "steps" else [kind]
    assert order == [*range(10), "phase", *range(10, 20), "failed", *range(20, 30), "done"]


class Unsendable:
    """A job whose metrics do not pickle."""

    stall_s = 60.0

    def __call__(self, seat, teller):
        teller.step(0)
        teller.metrics(0, {"lock": threading.Lock()})
        teller.flush()


def test_a_worker_says_that_its_metrics_cannot_be_sent():
    """And neither ends as if all were well nor raises in the actor."""
    told = []

    def send(message):
        if message[0] == "steps":
            raise TypeError("cannot pickle '_thread.lock' object")
        told.append(message)

    work(Unsendable(), Seat(0, 1, 0, 1, "127.0.0.1", 1), 0, send, Mark())
    assert [kind for kind, *_ in told] == ["failed"]
    assert told[0][3].error == "TypeError: cannot pickle '_thread.lock' object"


def test_the_step_of_a_killed_process_can_be_read():
    code = (
        "import os, sys; from monarch_rocm.distributed.mark import Mark; mark = Mark()\n"
        "print(mark.file, flush=True); sys.stdin.readline(); mark.set(0); mark.set(41)\n"
        "print('set', flush=True); sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as child:
        mark = MarkOf(child.pid, int(child.stdout.readline()))
        assert mark.step() is None
        child.stdin.write("\n")
        assert child.stdout.readline() == "set\n"
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert mark.step() == 41
    assert MarkOf(child.pid, 3).step() is None  # nothing there to read
