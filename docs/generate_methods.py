"""Writes a page for every method into ``docs/methods``, from what its text says about itself.

    python docs/generate_methods.py

Each page has the idea, the equations, what leaves the client (with the names that the ledger uses),
the hyper-parameters, and where published code differs (``docs/methods/differences.yaml``). A test
compares the pages with this.
"""

import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from feddg.methods.base import Method, methods

FOLDER = Path(__file__).parent / "methods"
DIFFERENCES = FOLDER / "differences.yaml"
NO_DIFFERENCE = "No difference is known."
FAMILIES = {
    "averaging": "fedavg fedprox scaffold fedgma csac centralised",
    "invariance over domains": "irm vrex fish mmd coral fedsr fpl selfreg rsc",
    "styles": "ccst pardon mixstyle elcfs vista",
    "augmentation": "dart outlines randaug randconv mixup l2d jigen sfa",
    "normalisation": "fedbn silobn fedig fedig-a",
    "personalised": "local copa",
    "worst case": "afl group_dro feddg-ga",
    "closed form": "ridge",
}
"""What each method works on; a method stands in one."""
HEADINGS = ("Equations", "Leaves the client", "Decisions")


def description_of(method: type) -> str:
    """Returns a method's description: the docstring with equations, of its class or its module."""
    text = inspect.getdoc(method) or ""
    return text if "\nEquations:" in text else inspect.getdoc(sys.modules[method.__module__]) or ""


def sections(method: type[Method]) -> tuple[str, str, dict[str, str]]:
    """Splits a method's text.

    Returns:
        Its first line, the paragraphs before the first heading, and the text under each heading.

    Raises:
        ValueError: a heading is missing.
    """
    text = description_of(method)
    first_line, _, rest = text.partition("\n")
    before, *parts = re.split(r"^([A-Z][A-Za-z ]+):\n(?=    )", rest, flags=re.MULTILINE)
    found = {name: inspect.cleandoc(body) for name, body in zip(parts[::2], parts[1::2])}
    missing = [name for name in HEADINGS if name not in found]
    if missing:
        raise ValueError(f"{method.__module__}: the docstring lacks {missing[0]!r}")
    return first_line.rstrip("."), before.strip(), found


def page(method: type[Method]) -> str:
    """Returns the method's page as Markdown."""
    first_line, idea, found = sections(method)
    names = " or ".join(f"`{name}`" for name in (method.name, *method.aliases))
    source = f"../../src/{method.__module__.replace('.', '/')}.py"
    parts = [
        f"# {method.title}",
        f"**{first_line}** ([{names}]({source})).",
        _code(idea),
        "## Equations",
        f"```\n{found['Equations']}\n```",
        "## What leaves the client",
        _code(found["Leaves the client"]),
        _messages(method),
        "## Hyper-parameters",
        _settings(method),
        *_presets(method),
        *_differences(method),
        "## Decisions",
        _code(found["Decisions"]),
        *_excluded(method),
    ]
    return "\n\n".join(parts) + "\n"


def _code(text: str) -> str:
    return text.replace("``", "`")


def _messages(method: type[Method]) -> str:
    """What a method sends besides what every update has."""
    own = {name: text for name, text in method.sends.items() if Method.sends.get(name) != text}
    every = "README.md#what-every-update-has"
    if not own:
        return f"[Nothing else]({every})."
    rows = [(f"`{name}`", text) for name, text in own.items()]
    return f"Besides [what every update has]({every}):\n\n{_table(('entry', 'what it is'), rows)}"


def _settings(method: type[Method]) -> str:
    fields = method.Settings.model_fields
    if not fields:
        return "None."
    rows = []
    for name, field in fields.items():
        properties = method.Settings.model_json_schema()["properties"][name]
        default = field.get_default(call_default_factory=True)
        values = ", ".join(filter(None, [f"`{default}`", _choices(properties, str(default))]))
        rows.append((f"`{name}`", values, field.description or ""))
    return _table(("name", "default, others", "meaning and source"), rows)


def _choices(schema: Mapping[str, object], default: str) -> str:
    """The other values that a setting may have, if it is one of a few."""
    options = schema.get("enum", ())
    assert isinstance(options, list | tuple)
    return ", ".join(f"`{option}`" for option in options if str(option) != default)


def _presets(method: type[Method]) -> list[str]:
    found: dict[str, list[str]] = {}
    for data, fields in method.presets.items():
        values = ", ".join(f"`{field}` = `{value}`" for field, value in _flat(fields))
        found.setdefault(values, []).append("every data set" if data == "*" else f"`{data}`")
    lines = [f"Preset for {', '.join(sets)}: {values}." for values, sets in found.items()]
    return ["\n".join(lines)] if lines else []


def _flat(fields: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for name, value in fields.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{prefix}{name}.")
        else:
            pairs.append((prefix + name, value))
    return pairs


def _differences(method: type[Method]) -> list[str]:
    known = yaml.safe_load(DIFFERENCES.read_text("utf-8"))[method.name]
    if known["code"].startswith("none: "):  # of this project
        return []
    told = ["## Where it differs from the authors' code", f"Compared with: {_code(known['code'])}."]
    if not known.get("differences"):
        return told if known["code"].startswith("none") else [*told, NO_DIFFERENCE]
    rows = [
        (
            each["theirs"],
            each["ours"],
            each["why"] + (f" (`{each['setting']}`)" if "setting" in each else ""),
        )
        for each in known["differences"]
    ]
    head = ("the code", "here", "why")
    return [*told, _table(head, [tuple(map(_code, row)) for row in rows])]


def _excluded(method: type[Method]) -> list[str]:
    """The methods that it refuses, or that refuse it; the refusal says why."""
    refuse = {name for name, other in methods().items() if method.name in other.excludes}
    names = ", ".join(f"`{name}`" for name in sorted({*method.excludes, *refuse} - {method.name}))
    return [f"Cannot be combined with {names}."] if names else []


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [
        [str(cell).replace("|", "\\|").replace("\n", " ") for cell in line]
        for line in (head, *rows)
    ]
    head_line, *lines = (f"| {' | '.join(line)} |" for line in cells)
    return "\n".join([head_line, f"|{'---|' * len(head)}", *lines])


def index(known: Mapping[str, type[Method]]) -> str:
    """Returns the list of all methods as Markdown."""
    families = {name: family for family, names in FAMILIES.items() for name in names.split()}
    if families.keys() != known.keys():
        odd = sorted(families.keys() ^ known.keys())
        raise ValueError(f"docs/generate_methods.py: FAMILIES must name each method once: {odd}")
    rows = [
        (family, f"[{known[name].title}]({name}.md)", f"`{name}`", known[name].summary)
        for name, family in families.items()
    ]
    return (
        "\n\n".join(
            [
                "# Methods",
                "Every method has a page with the idea, the equations, what leaves the client, "
                "the settings, and where it differs from its authors' code (in brackets, the "
                "setting that follows their code). Combine methods by joining their names: "
                "`ccst+jigen`. See also [which one to try](../which_method.md), what they "
                "[cost](../benchmarks.md#what-methods-cost), and how accurate they are on "
                "[digits](../benchmarks.md#digits) and on [PACS](../benchmarks.md#pacs).",
                _table(("family", "method", "name", "in one line"), rows),
                "## What every update has",
                _table(
                    ("entry", "what it is"),
                    [(f"`{name}`", text) for name, text in Method.sends.items()],
                ),
                "## Colour jitter",
                "The code of CCST, FedDG-GA, JiGen, PARDON, RSC and SelfReg shifts the hue in HSV, "
                "as torchvision does. Here one matrix per image rotates it in YIQ, in a third of "
                "the time (at 0.1, pixels differ by 0.076 on average); `train.hue=hsv` follows "
                "their code.",
            ]
        )
        + "\n"
    )


def pages() -> dict[str, str]:
    """Returns all pages by file name; methods of other packages are left out."""
    known = {n: m for n, m in methods().items() if m.__module__.startswith("feddg.methods.")}
    return {"README.md": index(known)} | {f"{name}.md": page(m) for name, m in known.items()}


def main() -> None:
    """Writes the pages, and removes those of methods that are gone."""
    FOLDER.mkdir(exist_ok=True)
    written = pages()
    for old in FOLDER.glob("*.md"):
        if old.name not in written:
            old.unlink()
    for name, text in written.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{len(written)} pages in {FOLDER}")


if __name__ == "__main__":
    main()
