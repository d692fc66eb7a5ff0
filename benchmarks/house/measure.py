"""Counts the house: code lines by room, long files, names used twice, what one round touches.

    python benchmarks/house/measure.py [SOURCE]

Code lines are those that hold a token other than a comment or a docstring.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

LONG = 300


def code_lines(path: Path) -> int:
    """Returns how many lines of a file hold code."""
    text = path.read_text(encoding="utf-8")
    documented = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                documented |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in empty and token.type != tokenize.ENDMARKER:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def rooms(package: Path) -> Counter[str]:
    """Returns code lines by room; a module at the top is a room of its own kind, ``(top)``."""
    found: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        inside = path.relative_to(package).parts
        found[inside[0] if len(inside) > 1 else "(top)"] += code_lines(path)
    return found


def used_twice(package: Path) -> tuple[list[str], list[str]]:
    """Returns the class names and the module names that occur more than once."""
    classes: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        if path.stem != "__init__":
            modules[path.stem] += 1
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name] += 1
    return [sorted(n for n, k in names.items() if k > 1) for names in (classes, modules)]


def main() -> None:
    """Prints the counts."""
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "src"
    package = source / "feddg"
    by_room = rooms(package)
    total = sum(by_room.values())
    for room, lines in by_room.most_common():
        print(f"{room:14} {lines:6} {lines / total:6.1%}")
    print(f"{'all':14} {total:6}")
    long = [p for p in package.rglob("*.py") if len(p.read_text().splitlines()) > LONG]
    print(f"files over {LONG} lines: {len(long)}: {', '.join(sorted(p.stem for p in long))}")
    classes, modules = used_twice(package)
    print(f"class names used twice: {len(classes)}: {', '.join(classes)}")
    print(f"module names used twice: {len(modules)}: {', '.join(modules)}")


if __name__ == "__main__":
    main()
