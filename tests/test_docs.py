"""Examples in docstrings and pages run, commands are commands, links lead somewhere."""

import ast
import csv
import doctest
import importlib
import importlib.util
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
import torch
import versions
from torch import nn

import monarch_rocm
from monarch_rocm import cli

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
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md"]
PAGES += sorted(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md"))


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


FENCE = re.compile(
    r"(?:<!-- not run: (?P<why>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$"
    r"|^<!-- run first\n(?P<setup>.*?)^-->$",
    re.M | re.S,
)


def blocks(page):
    return [match.groupdict() for match in FENCE.finditer((ROOT / page).read_text())]


RUN = [
    page
    for page in PAGES
    if any(block["language"] == "python" and not block["why"] for block in blocks(page))
]


@pytest.mark.parametrize("page", RUN)
@pytest.mark.filterwarnings("ignore:a Monarch layer")
def test_examples_of_pages(page, tmp_path, monkeypatch):
    """From top to bottom, each block after those before it, as somebody who reads would type them."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for block in blocks(page):
        if block["setup"] and "transformers" in block["setup"]:
            pytest.importorskip("transformers")
        if block["setup"] or (block["language"] == "python" and not block["why"]):
            exec(compile(block["setup"] or block["code"], page, "exec"), names)


@pytest.mark.parametrize("page", PAGES)
def test_examples_that_are_not_run_are_python_and_import_what_exists(page):
    for block in blocks(page):
        if block["why"]:
            for node in ast.walk(ast.parse(block["code"])):
                if isinstance(node, ast.ImportFrom) and node.module.startswith("monarch_rocm"):
                    module = importlib.import_module(node.module)
                    assert all(hasattr(module, name.name) for name in node.names)


def test_every_page_with_examples_is_known():
    assert {"README.md", "docs/quickstart.md", "docs/maths.md", "docs/training.md"} <= set(RUN)


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_pages_are_commands(page):
    """`monarch-rocm ...` in a block is what the command takes, `make ...` a target."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for block in blocks(page):
        if block["language"] != "sh":
            continue
        for line in block["code"].splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["monarch-rocm"]:
                cli.parser().parse_args(words[1:])
            if words[:1] == ["make"]:
                assert set(words[1:]) <= targets


def anchors(page):
    """Of the headings, as GitHub and mkdocs make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_site():
    """mkdocs itself checks the rest: `make docs`."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].partition("\nvalidation:")[0]
    named = set(re.findall(r": (\w+\.md)$", nav, re.M))
    assert {file.name for file in (ROOT / "docs").glob("*.md")} <= named


def test_the_table_of_versions_is_that_of_the_results():
    """No cell that was not run."""
    with versions.RESULTS.open() as file:
        table = versions.markdown(list(csv.DictReader(file)))
    assert f"{versions.MARKS[0]}\n{table}\n{versions.MARKS[1]}" in (ROOT / "README.md").read_text()


def test_the_api_page_has_every_public_name():
    named = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert set(monarch_rocm.__all__) <= {name.rpartition(".")[2] for name in named}


def test_the_calculator_prints_what_the_guide_shows(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = [block["code"] for block in blocks("docs/choosing.md") if block["language"] == "text"]
    assert cli.main(["plan", "4096", "4096"]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.strip("\n").splitlines()]
    assert shown == ["\n".join(printed) + "\n"]


def test_help_says_what_each_command_and_option_does():
    (commands,) = (action for action in cli.parser()._actions if action.choices and action.dest == "command")
    assert {"doctor", "plan", "bench", "tune", "codegen", "compress"} <= set(commands.choices)
    for name, command in commands.choices.items():
        assert command.description, name
        assert all(action.help for action in command._actions), name


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
