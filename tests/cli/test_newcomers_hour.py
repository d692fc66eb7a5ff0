"""docs/newcomers_hour.md, replayed on small generated folders of three sites."""

import re
import shlex
import shutil
from pathlib import Path

from image_folders import make_folder

PAGE = Path(__file__).parents[2] / "docs" / "newcomers_hour.md"
QUICKER = {"5": "1", "32": "16"}
"""One round of smaller images says the same in a fraction of the time."""
CLASSES = ("dog", "elephant", "guitar", "house")


def messy_sites(root: Path) -> None:
    """Three sites with what lies in folders of real life."""
    make_folder(root, ("camera", "comics", "museum"), CLASSES, each=8)
    (root / "museum" / "notes.txt").write_text("scanned 2019\n")
    content = (root / "comics" / "dog" / "0.png").read_bytes()
    (root / "comics" / "dog" / "broken.jpg").write_bytes(content[: len(content) // 2])
    shutil.copy(root / "camera" / "house" / "3.png", root / "museum" / "house" / "from_camera.jpg")


def steps() -> list[tuple[list[str], list[str]]]:
    """Returns the page's commands, each with the lines that stand below it."""
    found: list[tuple[list[str], list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((shlex.split(line[2:]), []))
            else:
                found[-1][1].append(line)
    return found


def skeleton(text: str) -> str:
    """A remark without its numbers and without what depends on the images."""
    return re.sub(r"\d[\d,.]*", "#", text)[:30]


def test_the_hour_goes_as_the_page_says(feddg, tmp_path):
    messy_sites(tmp_path / "sites")
    told = steps()
    assert [words[1] for words, _ in told if words[0] == "feddg"] == [
        "data",
        "run",
        "run",
        "compare",
        "predict",
    ]
    for words, lines in told:
        if words[0] == "mv":
            *sources, target = words[1:]
            for source in sources:
                shutil.move(source, target)
            continue
        arguments = [
            str(next(iter(tmp_path.glob(word)))) if "*" in word else QUICKER.get(word, word)
            for word in words[1:]
        ]
        code, shown, errors = feddg(*arguments)
        said = [line for line in lines if line.startswith(("error:", "warning:", "note:"))]
        assert code == int(any(line.startswith("error:") for line in said)), errors
        if words[1] == "compare":
            continue  # what is found in its numbers is the images' own
        output = {skeleton(line) for line in (shown + errors).splitlines()}
        for line in said:
            assert skeleton(line) in output, (words, line, shown + errors)
    assert (tmp_path / "labels.csv").is_file()
