"""Data flows one way: what each module imports, parsed and not run, against DESIGN's order and the map."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Imports inside of functions that go up the map. Each is made when somebody calls that function, not
# before, and none may be added without a reason here.
UPWARD = {
    ("integrations.transformers", "integrations.quantizer"),  # register() is called by the user
    ("kernels.tuning", "kernels.bdmm"),  # looks how that was decorated: for the interpreter or not
}
CHAIN = ("linear", "functional", "ops", "dispatch", "kernels.bdmm")


@cache
def modules():
    """Files of the package by dotted name without `monarch_rocm`, kernels from where they really are."""
    found = {}
    for folder, prefix in ((ROOT / "monarch_rocm", ()), (ROOT / "kernels", ("kernels",))):
        for file in folder.rglob("*.py"):
            if folder.joinpath("kernels") not in file.parents:
                found[".".join((*prefix, *file.relative_to(folder).with_suffix("").parts))] = file
    return found


def named(node, here):
    """Modules of the package that one import statement names."""
    if isinstance(node, ast.Import):
        paths = [alias.name.split(".") for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, f"{here} has a relative import"
        paths = [[*node.module.split("."), alias.name] for alias in node.names]
    else:
        return
    for first, *path in paths:
        if first == "monarch_rocm":
            names = [".".join(path[:length]) for length in range(len(path), 0, -1)]
            names = [name for name in names for name in (name, f"{name}.__init__") if name in modules()]
            if names or path[:1] != ["kernels"]:  # a folder without a module of its own
                yield names[0] if names else "__init__"


@cache
def imports(name, functions=True):
    """What a module imports, where it is loaded or also inside of functions."""
    found = set()

    def visit(node):
        for child in ast.iter_child_nodes(node):
            found.update(named(child, name) or ())
            if functions or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                visit(child)

    visit(ast.parse(modules()[name].read_text()))
    return frozenset(found - {name})


def reached(name):
    """All that a module comes to import, by way of others."""
    found, left = set(), [name]
    while left:
        here = left.pop()
        for there in imports(here) - found:
            if (here, there) not in UPWARD:
                found.add(there)
                left.append(there)
    return found


def test_the_parser_sees_imports():
    assert imports("linear") == {"dispatch", "functional", "init", "projection", "shape"}
    assert "kernels.bdmm" in imports("dispatch") - imports("dispatch", functions=False)
    assert "kernels.tuning" in imports("dispatch", functions=False)
    assert {"__init__", "bench"} <= imports("cli")


@pytest.mark.parametrize("place", range(1, len(CHAIN)), ids=lambda place: CHAIN[place])
def test_a_layers_way_to_its_kernels_has_no_back_edge(place):
    """DESIGN 4: module, checks, ops, choice of the path, kernels; also by way of other modules."""
    assert CHAIN[place] in reached(CHAIN[place - 1])
    assert not reached(CHAIN[place]) & set(CHAIN[:place])


def test_reference_and_kernels_know_nothing_of_each_other_or_of_what_calls_them():
    assert imports("reference") == {"shape"}
    kernels = {name for name in modules() if name.startswith("kernels.")}
    assert len(kernels) > 8
    for name in kernels:
        assert imports(name) <= kernels | {"hidden"}
        assert "torch.library" not in modules()[name].read_text()


def listed():
    """Modules in the order of the map in CONTRIBUTING: each may import what comes after it."""
    block = re.search(r"```text\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S).group(1)
    lines = block.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 110
    for line in lines:
        label, *names = line.split()
        prefix = label[:-1] + "." if label.endswith("/") else ""
        yield from (prefix + name for name in names)


def test_the_map_names_every_module_once_and_imports_go_down_it():
    order = list(listed())
    assert sorted(order) == sorted(modules())
    place = {name: number for number, name in enumerate(order)}
    up = {(here, there) for here in order for there in imports(here) if place[there] < place[here]}
    assert up == UPWARD


def test_nothing_goes_up_when_modules_are_loaded():
    for here, there in UPWARD:
        assert there not in imports(here, functions=False)
