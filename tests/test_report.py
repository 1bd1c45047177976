"""What `monarchize` reports, as a terminal, a program and a notebook see it."""

import pytest
from torch import nn

from monarch_rocm import MonarchConfig, MonarchLinear, monarchize, plan


@pytest.fixture(scope="module")
def report():
    return monarchize(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)), MonarchConfig(nblocks=4))[1]


def test_a_notebook_shows_the_table(report):
    shown = report._repr_html_()
    assert shown.startswith("<pre")
    assert "params before" in shown
    assert "4,192" in shown


def test_repr_is_one_line(report):
    assert repr(report) == (
        "<MonarchReport: 2 layers replaced, 0 left alone, 4,192 parameters before and 1,632 after>"
    )


def test_ipython_shows_a_plan_as_print_does():
    class Printer:
        def text(self, text):
            self.shown = text

    printer = Printer()
    planned = plan(MonarchLinear(32, 32), tokens=4)
    planned._repr_pretty_(printer, cycle=False)
    assert printer.shown == str(planned)
    assert "FLOPs" in printer.shown
