"""A run's images are part of it: what changes them is noticed, wherever the run is used again."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from feddg.api import compare, resume, run
from feddg.data import fingerprint
from feddg.data.fingerprint import ImagesFile
from feddg.errors import DataError, RunError
from feddg.experiment import Experiment
from feddg.methods.base import METHODS
from feddg.models.backbones import build_network
from feddg.prediction.evaluate import evaluate_run
from feddg.runs.observer import Observer
from feddg.runs.provenance import IMAGES, ImagesNow, has_begun
from feddg.styles.codec import load_codec
from image_folders import make_folder, noise

SMALL = {
    "hold_out": "c",
    "clients": {"number": 2},
    "model": {"backbone": "cnn", "weights": None, "embedding": "none"},
    "train": {"rounds": 2, "augmentation": "none"},
    "server": {"min_updates": 1},
}


@pytest.fixture
def root(tmp_path) -> Path:
    return make_folder(tmp_path / "images")


@pytest.fixture
def done(root, tmp_path):
    """Carries the experiment out, again and again."""

    def carry_out(**more):
        where = {"out": tmp_path / "runs", "cache": tmp_path / "cache", "report": False}
        return run(experiment(root), **where, **more)

    return carry_out


def experiment(root: Path, **change) -> Experiment:
    data = {"source": "folder", "root": root, "image_size": 8, "id_val": 0.2, "id_test": 0.2}
    return Experiment(data=data, **{**SMALL, **change})


def remove_class(root: Path) -> None:
    for domain in "abc":
        shutil.rmtree(root / domain / "y")
        make_folder(root, (domain,), ("z",), 1)  # so that there is something to tell apart


def move(root: Path) -> None:
    (root / "a/x/0.png").rename(root / "a/y/moved.png")


def double_test_set(root: Path) -> None:
    for file in sorted((root / "c").rglob("*.png")):
        shutil.copy(file, file.with_name(f"copy-{file.name}"))


def remove_half(root: Path) -> None:
    for number in range(3):
        for folder in ("a/x", "a/y", "b/x", "b/y"):
            (root / folder / f"{number}.png").unlink()


def repaint(root: Path) -> None:
    """Another picture of the same size, as old as the first."""
    file = root / "b/y/5.png"
    before = file.stat()
    file.write_bytes(file.read_bytes()[:-20] + bytes(20))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size


CHANGES = [
    (remove_class, r"3 added, 18 removed \("),
    (move, r"1 added, 1 removed \(a/x/0.png, a/y/moved.png\)"),
    (double_test_set, r"12 added \(c/x/copy-0.png, "),
    (remove_half, r"12 removed \(a/x/0.png, a/x/1.png, a/x/2.png and 9 more\)"),
    (repaint, r"1 changed \(b/y/5.png\)"),
]


@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_a_complete_run_is_not_passed_off_as_one_on_changed_images(done, root, change, said):
    folder = done().folder
    change(root)
    with pytest.raises(RunError, match=rf"images changed since .* began: {said}.*--again") as error:
        done()
    assert "\n" not in str(error.value)
    for use in (resume, evaluate_run):
        with pytest.raises(RunError, match=said):
            use(folder, cache=root.parent / "cache")


def write_decoder(file: Path, scale: float) -> None:
    weights = load_codec("compact").decoder.state_dict()
    save_file({name: (tensor * scale).contiguous() for name, tensor in weights.items()}, file)


def test_a_file_that_the_experiment_names_is_part_of_the_run(root, tmp_path):
    decoder, cache = tmp_path / "decoder.safetensors", tmp_path / "cache"
    write_decoder(decoder, 1)
    chosen = experiment(root, method={"name": "pardon", "decoder": decoder})
    with pytest.raises(KeyboardInterrupt):
        run(chosen, tmp_path / "runs", cache=cache, observer=Stop())
    (folder,) = (tmp_path / "runs").iterdir()
    write_decoder(decoder, 0.5)
    said = r"files changed since .* began: method\.decoder has another content"
    with pytest.raises(RunError, match=rf"{said}; put them back"):
        resume(folder, cache=cache)
    with pytest.raises(RunError, match=rf"{said}; --again"):
        run(chosen, tmp_path / "runs", cache=cache)
    write_decoder(decoder, 1)
    assert resume(folder, cache=cache).status == "completed"
    decoder.unlink()  # to measure the model nobody needs it
    assert evaluate_run(folder, cache=cache)


def test_a_table_of_splits_is_part_of_the_run(root, tmp_path):
    table, cache = tmp_path / "splits.csv", tmp_path / "cache"
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.png"))
    roles = {path: "test" if path.startswith("c/") else "train" for path in paths}

    def write() -> None:
        rows = [f"{path},{role}" for path, role in roles.items()]
        table.write_text("\n".join(["path,split", *rows]) + "\n")

    write()
    data = {"source": "folder", "root": root, "image_size": 8, "split_file": table}
    chosen = Experiment(data=data, **{**SMALL, "hold_out": {}})
    run(chosen, tmp_path / "runs", cache=cache)
    roles |= {path: "train" for path in paths if path.startswith("c/x/0")}
    write()
    with pytest.raises(RunError, match=r"files changed .* data\.split_file has another content"):
        run(chosen, tmp_path / "runs", cache=cache)


def test_a_root_that_was_renamed_away(done, root):
    folder = done().folder
    root.rename(root.with_name("elsewhere"))
    with pytest.raises(DataError, match="does not exist"):
        done()
    with pytest.raises(DataError, match="does not exist"):
        resume(folder, cache=root.parent / "cache")


def test_again_starts_anew_beside_the_old_run_and_is_found_from_then_on(done, root):
    first = done()
    remove_half(root)
    second = done(again=True)
    assert second.folder == first.folder.with_name(f"{first.folder.name}.2")
    assert second.clients != first.clients
    assert done().folder == done(again=True).folder == second.folder
    make_folder(root)  # the same images as in the beginning
    assert done().folder == done(again=True).folder == first.folder


class Stop(Observer):
    def round(self, row) -> None:
        raise KeyboardInterrupt


def test_resume_does_not_carry_on_with_half_of_the_images(done, root, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        done(observer=Stop())
    (folder,) = (tmp_path / "runs").iterdir()
    assert has_begun(folder)
    remove_half(root)
    with pytest.raises(RunError, match=r"12 removed.*put them back"):
        resume(folder, cache=tmp_path / "cache")
    make_folder(root)
    assert resume(folder, cache=tmp_path / "cache").status == "completed"


def test_compare_stops_before_anything_is_run(root, tmp_path):
    plan = {
        "name": "p",
        "base": experiment(root).model_dump(exclude={"method", "hold_out", "seed"}),
        "hold_out": ["c"],
        "methods": ["fedavg"],
        "seeds": 1,
    }
    where = {"out": tmp_path / "p", "cache": tmp_path / "cache", "report": False}
    assert not compare(plan, **where).failures
    remove_half(root)
    with pytest.raises(RunError, match="12 removed"):
        compare(plan, **where)
    assert not compare(plan, again=True, **where).failures
    runs = sorted(path.name for path in (tmp_path / "p").iterdir() if path.is_dir())
    assert runs[1] == f"{runs[0]}.2"


def test_nothing_is_read_again_that_has_not_changed(done, root, monkeypatch):
    done()
    read = []
    original = fingerprint.hash_file
    monkeypatch.setattr(fingerprint, "hash_file", lambda path: read.append(path) or original(path))
    done()
    assert read == []
    noise(99).save(root / "a/x/new.png")
    with pytest.raises(RunError, match="1 added"):
        done()
    assert [path.name for path in read] == ["new.png"]


def test_the_file_is_compact_and_read_back(done):
    file = done().folder / IMAGES
    content = ImagesFile.read(file)
    assert len(content.contents()) == content.count == 36
    assert file.read_text().count("\n") == 1
    per_image = len(file.read_text()) / content.count
    assert per_image < 60  # six megabytes for 100,000 images


def test_identity_does_not_depend_on_where_the_command_is_given(root, tmp_path, monkeypatch):
    monkeypatch.chdir(root.parent)
    here = experiment(Path("images"))
    monkeypatch.chdir(root)
    assert here.id == experiment(Path("../images")).id == experiment(root).id
    assert here.data.root == root


def test_moved_labels_of_the_same_files_are_a_change(done):
    before = ImagesFile.read(done().folder / IMAGES)
    changed = before.model_copy(update={"labels": "other"})
    assert "other classes, domains" in str(fingerprint.difference(before, changed))


def test_other_weights_under_the_same_name_are_noticed(root, tmp_path, done):
    network = build_network("cnn", 2, weights=None, seed=1).featurizer
    file = tmp_path / "mine.safetensors"
    where = {"out": tmp_path / "runs", "cache": tmp_path / "cache", "report": False}
    chosen = {"model": {"backbone": "cnn", "weights": str(file), "embedding": "none"}}
    save_file(network.state_dict(), file)
    run(experiment(root, **chosen), **where)
    save_file({name: tensor + 1 for name, tensor in network.state_dict().items()}, file)
    with pytest.raises(RunError, match=r"model\.weights has another content.*--again"):
        run(experiment(root, **chosen), **where)


@pytest.mark.parametrize(
    "edit",
    [
        lambda rows: [row.replace("train", "id_val", 1) for row in rows],
        lambda rows: [row.replace("north", "south", 1) for row in rows],
        lambda rows: [*rows[:1], *reversed(rows[1:])],
    ],
)
def test_an_edited_table_is_another_one(tmp_path, edit):
    rows = ["path,label,domain,split,client"]
    for number in range(4):
        noise(number).save(tmp_path / f"{number}.png")
        rows.append(f"{number}.png,{'xy'[number % 2]},a,train,{('north', 'east')[number // 2]}")
    file = tmp_path / "table.csv"

    def now():
        file.write_text("\n".join(rows) + "\n")
        chosen = Experiment(data={"source": "table", "root": file}, model={"weights": None})
        return ImagesNow(tmp_path / "cache")(chosen)

    before, rows = now(), edit(rows)
    changed = fingerprint.difference(before, now())
    assert "roles, clients or groups" in str(changed)


def read_method(file: Path, factor: float) -> None:
    """Registers a method of a module that was just written or edited."""
    file.write_text(f"""
import feddg

def scaled(loss):
    return {factor} * loss

@feddg.register
class Ours(feddg.Method):
    name = "ours"

    def loss(self, client, batch):
        return {{name: scaled(loss) for name, loss in super().loss(client, batch).items()}}
""")
    found = importlib.util.spec_from_file_location("ours", file)
    sys.modules["ours"] = module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)


def test_the_code_of_a_method_of_ones_own_is_part_of_the_run(root, tmp_path, monkeypatch):
    monkeypatch.setattr(METHODS, "_found", dict(METHODS))
    monkeypatch.setitem(sys.modules, "ours", None)
    data = {"source": "folder", "root": root, "image_size": 8}
    plan = {"methods": ["ours"], "base": SMALL | {"data": data}}
    where = {"out": tmp_path / "runs", "cache": tmp_path / "cache", "report": False}

    def table(**more):
        return compare(plan, **where, results=tmp_path / "results.csv", **more).frame()

    read_method(tmp_path / "ours.py", 1)
    first = table()
    read_method(tmp_path / "ours.py", 1)
    assert table().equals(first)
    read_method(tmp_path / "ours.py", -1)
    with pytest.raises(RunError, match=r"have changed since \(method code of ours"):
        table()
    (tmp_path / "results.csv").unlink()
    with pytest.raises(RunError, match="method code has another content"):
        table()
    assert not table(again=True).equals(first)
