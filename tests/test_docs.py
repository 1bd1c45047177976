"""Examples in docstrings and in the README run and print what they say."""

import doctest
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import monarch_rocm

ROOT = Path(__file__).parent.parent
MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(monarch_rocm.__path__, "monarch_rocm.")
    if not name.startswith("monarch_rocm.kernels") and not name.endswith("__main__")
    if name != "monarch_rocm.distributed.worker" or importlib.util.find_spec("monarch")
]
NEEDS = {
    "monarch_rocm.integrations.lora": "peft",
    "monarch_rocm.integrations.peft": "peft",
    "monarch_rocm.integrations.quantizer": "transformers",
    "monarch_rocm.integrations.transformers": "transformers",
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:a Monarch layer")
def test_docstring_examples(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    module = importlib.import_module(name)
    public = {key: getattr(monarch_rocm, key) for key in monarch_rocm.__all__}
    extra = {"torch": torch, "nn": nn, "monarch_rocm": monarch_rocm, **public}
    extra = {key: value for key, value in extra.items() if not hasattr(module, key)}
    failed, _ = doctest.testmod(module, extraglobs=extra, optionflags=doctest.ELLIPSIS)
    assert failed == 0


@pytest.mark.parametrize("name", monarch_rocm.__all__)
def test_public_names_have_an_example(name):
    assert ">>> " in getattr(monarch_rocm, name).__doc__


@pytest.mark.parametrize("page", ["README.md", "docs/training.md", "docs/interop.md"])
def test_examples_of_pages(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})


def test_readme_commands_are_make_targets():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"`?make ([\w-]+)", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= named <= targets


def test_pages_about_cdna_say_that_nothing_ran_there():
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "kernels/README.md")]
    pages += (ROOT / "docs").glob("*.md")
    about = [page for page in pages if re.search(r"gfx9|CDNA|MI300", page.read_text())]
    assert ROOT / "docs" / "amd.md" in about
    for page in about:
        said = re.search(r"[Nn]othing (was( ever)? run|was tuned) on (an )?AMD", page.read_text())
        assert said, f"{page.name} shows facts of CDNA as if they were measured"


def test_workflows_are_sound():
    """YAML that says when and where, actions pinned by their major version, targets that exist."""
    yaml = pytest.importorskip("yaml")
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = file.read_text()
        parsed = yaml.safe_load(text)
        when = True  # as which YAML 1.1 reads the key `on`
        assert when in parsed
        assert all("timeout-minutes" in job and "runs-on" in job for job in parsed["jobs"].values())
        steps = [step for job in parsed["jobs"].values() for step in job["steps"]]
        used = [step["uses"] for step in steps if "uses" in step]
        assert used
        assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", action) for action in used)
        assert set(re.findall(r"make ([\w-]+)", text)) <= targets


def test_the_issue_form_asks_for_what_the_commands_print():
    yaml = pytest.importorskip("yaml")
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "amd-results.yml").read_text())
    asked = {part["id"] for part in form["body"] if "id" in part}
    assert {"doctor", "suite", "bench", "tune", "plan"} <= asked


def test_every_fault_of_the_list_has_a_test_or_a_limit():
    """Each row of docs/limits.md names tests that exist or says why there is none, and they are counted."""
    page = (ROOT / "docs" / "limits.md").read_text()
    rows = [row.split(" | ")[-1].strip(" |") for row in re.findall(r"^\| (?:peer|ecosystem).*$", page, re.M)]
    limits = [row for row in rows if row.startswith("limit: ")]
    counted = (
        f"There are {len(rows)} entries: {len(rows) - len(limits)} have tests, and {len(limits)} are limits."
    )
    assert counted in page
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named or row in limits
        for file, name in named:
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M), f"{file}::{name}"
    of_ecosystem = re.findall(r"^\| ecosystem (\d+)", page, re.M)
    assert of_ecosystem == [str(number) for number in range(1, 19)]
