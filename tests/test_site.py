"""The pages: links lead somewhere, and the reference is complete."""

import re

import pytest

from documented_commands import ROOT, command_of, pages, shown_commands
from feddg.settings import ExperimentSettings, leaves
from scripts import load_script

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
COMMANDS = [shown for page in pages() for shown in shown_commands(page)]


def module(name):
    return load_script(ROOT / "docs" / f"{name}.py")


def anchors(text):
    """The anchors of a page's headings, as GitHub and the site make them."""
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", plain, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_every_link_leads_somewhere():
    broken = []
    for page in pages():
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.DOTALL)
        for target in LINK.findall(text):
            file, _, anchor = target.partition("#")
            if ":" in file:
                continue
            goal = (page.parent / file).resolve() if file else page
            there = goal.exists()
            if there and anchor and goal.suffix == ".md":
                there = anchor in anchors(goal.read_text("utf-8"))
            if not there:
                broken.append((page, target))
    assert not broken


def test_the_reference_has_every_setting_and_every_command():
    made = module("generate_reference").pages()
    fields = leaves(ExperimentSettings().model_dump(mode="json"))
    for path in fields:
        if path != "defences":
            assert f"`{path}`" in made["settings.md"], path
    for shown in COMMANDS:
        _, rest = command_of(shown.words)
        command = " ".join(shown.words[: len(shown.words) - len(rest)])
        assert command == "feddg" or f"## `{command}`" in made["command_line.md"]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "reference" / "settings.html").is_file()


def test_links_are_turned_to_the_pages_of_the_site():
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    linked = module("site_pages").linked
    known = {"index.md", "contributing.md", "tutorial.md", "methods/README.md", "compare.md"}
    assert linked("[a](docs/tutorial.md#x)", "index.md", known) == "[a](tutorial.md#x)"
    assert linked("[a](../CONTRIBUTING.md)", "tutorial.md", known) == "[a](contributing.md)"
    assert linked("[a](../compare.md)", "methods/README.md", known) == "[a](../compare.md)"
    assert linked("[a](LICENSE)", "index.md", known) == "a"
    assert linked("`[A][B]` [A][B]", "tutorial.md", known) == "`[A][B]` [A]\\[B]"
    assert linked("[a](no_page.md)", "tutorial.md", known) == "[a](no_page.md)"
