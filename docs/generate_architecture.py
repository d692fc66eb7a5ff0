"""Writes the table of modules in docs/architecture.md from the modules' own first lines.

python docs/generate_architecture.py
"""

import ast
from pathlib import Path

import feddg

PAGE = Path(__file__).parent / "architecture.md"
MARK = "<!-- modules -->\n"


def modules() -> dict[str, dict[str, str]]:
    """Returns the first line of every module's docstring by room and module."""
    package = Path(feddg.__file__).parent
    found: dict[str, dict[str, str]] = {}
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package).with_suffix("").parts
        room, name = inside[0] if len(inside) > 1 else "", "/".join(inside[1:] or inside)
        if inside[-1] != "__init__":
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            found.setdefault(room, {})[name] = " ".join(text.split("\n\n")[0].split())
    return found


def page(text: str) -> str:
    """Returns the page with a fresh table."""
    head, mark, _ = text.partition(MARK)
    lines = [head + mark]
    for room, own in modules().items():
        lines.append(
            f"\n**{room or 'the ground and the front'}**\n\n| module | what it is |\n|---|---|\n"
        )
        lines += [f"| `{name}` | {' '.join(said.split())} |\n" for name, said in own.items()]
    return "".join(lines)


def main() -> None:
    """Rewrites the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
