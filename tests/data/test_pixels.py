"""The pixel cache: decoded once, shared, never stale, never half there; and its stand-ins."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from feddg.data import decoded as pixel_cache
from feddg.data import images
from feddg.data.decoded import StreamingPixels, open_pixels
from feddg.data.images import ImageTable
from feddg.data.pixels import ArrayPixels
from feddg.errors import DataError
from feddg.storage import open_file

SIZE = 8


def picture(number: int, side: int = SIZE) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)


def table_of(root: Path, paths: list[str]) -> ImageTable:
    labels = np.arange(len(paths), dtype=np.int64) % 2
    zeros = np.zeros(len(paths), np.int64)
    return ImageTable(tuple(paths), labels, zeros, ("a", "b"), ("only",), root=root)


@pytest.fixture
def table(tmp_path: Path) -> ImageTable:
    """Six pictures at the resolution they are asked for, so that decoding changes nothing."""
    root = tmp_path / "images"
    root.mkdir()
    paths = [f"{number}.png" for number in range(6)]
    for number, path in enumerate(paths):
        Image.fromarray(picture(number)).save(root / path)
    return table_of(root, paths)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files decoded so far."""
    names: list[str] = []
    original = pixel_cache.decode_parts

    def counting(path: Path, *args) -> list[np.ndarray]:
        names.append(path.name)
        return original(path, *args)

    monkeypatch.setattr(pixel_cache, "decode_parts", counting)
    return names


def expected(numbers: list[int]) -> torch.Tensor:
    stacked = np.stack([picture(number) for number in numbers])
    return torch.from_numpy(stacked).permute(0, 3, 1, 2)


ROWS = [4, 0, 0, 5]


@pytest.mark.parametrize("budget", [10**6, 0])
@pytest.mark.parametrize("rows", [ROWS, np.array(ROWS), torch.tensor(ROWS)])
def test_rows_are_gathered_channels_last(table: ImageTable, tmp_path: Path, budget, rows) -> None:
    _, store, _ = open_pixels(table, SIZE, cache=tmp_path / "cache", budget_bytes=budget)
    batch = store.gather(rows)
    assert torch.equal(batch, expected(ROWS))
    assert batch.dtype == torch.uint8
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert len(store) == 6
    assert store.size == SIZE
    with pytest.raises(IndexError):
        store.gather([6])


def test_every_file_is_decoded_once(table: ImageTable, tmp_path: Path, decoded: list[str]) -> None:
    seen: list[tuple[str, int, int]] = []
    open_pixels(table, SIZE, cache=tmp_path, progress=lambda *step: seen.append(step))
    assert sorted(decoded) == sorted(table.paths)
    assert seen == [("decoding images", done, 6) for done in range(1, 7)]
    decoded.clear()
    _, store, _ = open_pixels(table, SIZE, cache=tmp_path, progress=lambda *step: seen.append(step))
    store.gather(range(6))
    assert decoded == []
    assert len(seen) == 6


def test_rows_in_another_order_or_repeated_share_the_cache(
    table: ImageTable, tmp_path: Path, decoded: list[str]
) -> None:
    _, first, _ = open_pixels(table, SIZE, cache=tmp_path)
    decoded.clear()
    order = [5, 1, 1, 3, 0, 2, 4]
    kept, store, _ = open_pixels(table.take(order), SIZE, cache=tmp_path)
    assert decoded == []
    assert kept.paths == tuple(table.paths[row] for row in order)
    assert torch.equal(store.gather(range(7)), expected(order))
    assert store.fingerprint != first.fingerprint


def test_a_changed_file_size_or_resize_is_decoded_anew(
    table: ImageTable, tmp_path: Path, decoded: list[str]
) -> None:
    def decodes(**changes) -> int:
        decoded.clear()
        open_pixels(table, **{"size": SIZE, "cache": tmp_path, **changes})
        return len(decoded)

    assert decodes() == 6
    assert decodes(size=SIZE + 1) == 6
    assert decodes(resize="pad") == 6
    changed = table.root / "3.png"
    before = changed.stat()
    Image.fromarray(picture(33)).save(changed)
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert decodes() == 6
    _, store, _ = open_pixels(table, SIZE, cache=tmp_path)
    assert torch.equal(store.gather([3]), expected([33]))
    os.utime(changed, ns=(0, 0))
    assert decodes() == 6
    assert decodes() == 0


def test_equal_paths_under_another_root_are_other_images(table: ImageTable, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for number, path in enumerate(table.paths):
        Image.fromarray(picture(number + 50)).save(other / path, compress_level=0)
        Image.fromarray(picture(number)).save(table.root / path, compress_level=0)
        os.utime(other / path, ns=(0, 0))
        os.utime(table.root / path, ns=(0, 0))
    _, first, _ = open_pixels(table, SIZE, cache=tmp_path)
    _, second, _ = open_pixels(table_of(other, list(table.paths)), SIZE, cache=tmp_path)
    assert torch.equal(first.gather([0]), expected([0]))
    assert torch.equal(second.gather([0]), expected([50]))
    assert first.fingerprint != second.fingerprint


def test_streaming_gives_the_same_pixels_and_fingerprint(
    table: ImageTable, tmp_path: Path, decoded: list[str]
) -> None:
    _, stored, _ = open_pixels(table, 5, cache=tmp_path)
    decoded.clear()
    for cache in (tmp_path, None):
        _, streamed, _ = open_pixels(table, 5, cache=cache, budget_bytes=6 * 5 * 5 * 3 - 1)
        assert isinstance(streamed, StreamingPixels)
        assert streamed.fingerprint == stored.fingerprint
        assert torch.equal(streamed.gather(ROWS), stored.gather(ROWS))
    assert len(decoded) == 6 + 2 * len(ROWS)  # without a cache all files are checked first


def test_the_check_of_a_streamed_table_is_remembered(
    table: ImageTable, tmp_path: Path, decoded: list[str]
) -> None:
    (table.root / "2.png").write_bytes(b"")
    for decodes in (6, 0):
        decoded.clear()
        kept, store, bad = open_pixels(table, SIZE, cache=tmp_path, budget_bytes=0)
        assert len(decoded) == decodes
        assert [image.path for image in bad] == ["2.png"]
        assert torch.equal(store.gather([2]), expected([3]))
        assert len(kept) == len(store) == 5


def test_a_damaged_check_is_made_again(table: ImageTable, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for _ in range(2):
        _, _, bad = open_pixels(table, SIZE, cache=cache, budget_bytes=0)
        assert bad == []
        (answer,) = cache.iterdir()
        assert json.loads(answer.read_text())["bad"] == []
        answer.write_text("{")


def test_a_streamed_file_that_vanishes_is_named(table: ImageTable, tmp_path: Path) -> None:
    _, store, _ = open_pixels(table, SIZE, cache=None)
    (table.root / "1.png").unlink()
    with pytest.raises(DataError, match=r"1\.png was readable before.*not found"):
        store.gather([1])


def test_bad_images_are_left_out_and_named_once(
    table: ImageTable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (table.root / "1.png").write_bytes(b"")
    (table.root / "4.png").write_bytes(b"no picture")
    for _ in range(2):  # decoded, then from the cache
        caplog.clear()
        with caplog.at_level(logging.WARNING, "feddg"):
            kept, store, bad = open_pixels(table, SIZE, cache=tmp_path)
        assert [(image.path, image.reason) for image in bad] == [
            ("1.png", "empty file"),
            ("4.png", "not an image in a known format"),
        ]
        assert kept.paths == ("0.png", "2.png", "3.png", "5.png")
        assert kept.labels.tolist() == [0, 0, 1, 1]
        assert torch.equal(store.gather(range(4)), expected([0, 2, 3, 5]))
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith("2 of 6 images left out: 1.png (empty file), 4.png (not")


@pytest.mark.parametrize("budget", [10**6, 0])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        *((OSError(n, os.strerror(n)), os.strerror(n)) for n in (errno.EIO, errno.EMFILE)),
        (MemoryError(), "out of memory"),
    ],
)
@pytest.mark.parametrize("opening", [1, 2])
def test_a_fault_that_passes_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, words, budget, opening
) -> None:
    deep = np.arange(SIZE * SIZE, dtype=np.uint16).reshape(SIZE, SIZE)
    for name in ("a", "b"):
        Image.fromarray(deep).save(tmp_path / f"{name}.tif")
    table = table_of(tmp_path, ["a.tif", "b.tif"])
    opened: list[str] = []  # by Pillow, then by tifffile

    def failing(path: Path):
        opened.append(path.name)
        if path.name == "b.tif" and opened.count("b.tif") == opening:
            raise fault
        return open_file(path)

    with monkeypatch.context() as patched:
        patched.setattr(images, "open_file", failing)
        with pytest.raises(DataError, match=rf"b\.tif cannot be read: {words}; start again"):
            open_pixels(table, SIZE, cache=tmp_path / "cache", budget_bytes=budget)
    _, _, bad = open_pixels(table, SIZE, cache=tmp_path / "cache", budget_bytes=budget)
    assert not bad


def test_many_bad_images_are_one_short_line(
    table: ImageTable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [*table.paths, *(f"missing{i}.png" for i in range(8))]
    with caplog.at_level(logging.WARNING, "feddg"):
        _, _, bad = open_pixels(table_of(table.root, paths), SIZE, cache=tmp_path)
    assert len(bad) == 8
    assert caplog.messages[0].endswith("missing4.png (file not found) and 3 more.")


def test_bad_images_fail_where_asked(table: ImageTable, tmp_path: Path) -> None:
    (table.root / "1.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"1 of 6 images .*1\.png \(empty file\)"):
        open_pixels(table, SIZE, cache=tmp_path, on_bad_image="fail")


@pytest.mark.parametrize("budget", [10**6, 0])
def test_only_bad_images_is_an_error(table: ImageTable, tmp_path: Path, budget: int) -> None:
    for path in table.paths:
        (table.root / path).write_bytes(b"")
    with pytest.raises(DataError, match="None of the 6 images can be used"):
        open_pixels(table, SIZE, cache=tmp_path, budget_bytes=budget)


def rendered(images: np.ndarray) -> ImageTable:
    names = tuple(f"ink/0/{row}" for row in range(len(images)))
    zeros = np.zeros(len(images), np.int64)
    return ImageTable(names, zeros, zeros, ("a",), ("ink",), images=images)


def test_rendered_images_stay_in_memory(tmp_path: Path) -> None:
    images = np.stack([picture(number) for number in range(3)])
    table, store, bad = open_pixels(rendered(images), SIZE, cache=tmp_path / "unused")
    assert isinstance(store, ArrayPixels)
    assert len(table) == 3
    assert bad == []
    assert torch.equal(store.gather([2, 0]), expected([2, 0]))
    assert not (tmp_path / "unused").exists()
    _, other, _ = open_pixels(rendered(images[::-1].copy()), SIZE, cache=None)
    assert other.fingerprint != store.fingerprint


def test_rendered_images_are_resized() -> None:
    images = np.stack([picture(number, 12) for number in range(3)])
    _, store, _ = open_pixels(rendered(images), 6, cache=None)
    expected = [np.asarray(Image.fromarray(i).resize((6, 6), Image.BILINEAR)) for i in images]
    assert (store.gather(range(3)).permute(0, 2, 3, 1).numpy() == expected).all()


def test_an_empty_table_is_an_error(table: ImageTable) -> None:
    with pytest.raises(DataError, match="no images"):
        open_pixels(table.take([]), SIZE, cache=None)


def left_behind(cache: Path) -> list[Path]:
    return [p for p in cache.iterdir() if not p.name.startswith(("pixels-", "checked-"))]


def test_a_full_disk_is_reported_and_cleaned_up(
    table: ImageTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = tmp_path / "cache"
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(DataError, match=r"cache.*No space left"):
            open_pixels(table, SIZE, cache=cache)
    assert list(cache.iterdir()) == []
    open_pixels(table, SIZE, cache=cache)


def test_a_cache_that_cannot_be_made_is_reported(table: ImageTable, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"Cannot write the pixel cache in .*file"):
        open_pixels(table, SIZE, cache=tmp_path / "file" / "cache")


def _spoil(file: Path, change: Callable[[np.ndarray], None]) -> None:
    found = np.load(file)
    change(found)
    np.save(file, found)


def _exchange(found: np.ndarray) -> None:
    found[[1, 4]] = found[[4, 1]]


def _flip(found: np.ndarray) -> None:
    found[3, 2, 2, 0] ^= 4


def _empty(found: np.ndarray) -> None:
    found[2:5] = 0


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("pixels", lambda file: os.truncate(file, file.stat().st_size // 2)),
        ("checked", lambda file: os.truncate(file, file.stat().st_size // 2)),
        ("pixels", lambda file: _spoil(file, _exchange)),
        ("pixels", lambda file: _spoil(file, _flip)),
        ("pixels", lambda file: _spoil(file, _empty)),
    ],
    ids=["cut", "cut list", "exchanged rows", "flipped bit", "zeros"],
)
def test_a_damaged_entry_is_made_again(
    table: ImageTable, tmp_path: Path, kind: str, damage: Callable[[Path], None], caplog: Any
) -> None:
    cache = tmp_path / "cache"
    for warnings in (1, 0):
        open_pixels(table, SIZE, cache=cache)
        if warnings:
            (file,) = cache.glob(f"{kind}-*")
            damage(file)
        caplog.clear()
        _, store, _ = open_pixels(table, SIZE, cache=cache)
        assert torch.equal(store.gather(range(6)), expected(list(range(6))))
        assert [r.message.count("decoded again") for r in caplog.records] == [1] * warnings
    assert left_behind(cache) == []


def test_the_second_to_finish_takes_nothing_from_the_first(
    table: ImageTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, original = tmp_path / "cache", pixel_cache._decode_to
    first = []

    def overtaken(file: Path, *args) -> None:
        original(file, *args)
        monkeypatch.setattr(pixel_cache, "_decode_to", original)
        first.append(pool.submit(open_pixels, table, SIZE, cache=cache).result()[1])

    monkeypatch.setattr(pixel_cache, "_decode_to", overtaken)
    with ThreadPoolExecutor(1) as pool:
        _, store, _ = open_pixels(table, SIZE, cache=cache)
    for one in (*first, store):
        assert torch.equal(one.gather(range(6)), expected(list(range(6))))
    assert len(list(cache.iterdir())) == 2


PROCESS = """
import json, os, signal, sys, time
from pathlib import Path
import numpy as np
from feddg.data import decoded
from feddg.data.images import ImageTable
root, cache, own, doomed = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
decode, count = decoded.decode_parts, []
def slowly(*args):
    count.append(1)
    time.sleep(0.05)
    if doomed == "doomed" and len(count) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return decode(*args)
decoded.decode_parts = slowly
paths = tuple(sorted(path.name for path in root.iterdir()))
zeros = np.zeros(len(paths), np.int64)
own.touch()
while len(list(own.parent.glob("ready*"))) < 3:
    time.sleep(0.01)
_, store, _ = decoded.open_pixels(
    ImageTable(paths, zeros, zeros, ("a",), ("only",), root=root), 8, cache=cache
)
print(json.dumps([len(count), store.gather(range(len(paths))).permute(0, 2, 3, 1).tolist()]))
"""


def test_processes_may_race_and_one_may_be_killed_half_way(
    table: ImageTable, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, table.root, cache, tmp_path / f"ready{name}", name],
            stdout=subprocess.PIPE,
        )
        for name in ("first", "second", "doomed")
    ]
    outputs = [racer.communicate(timeout=120)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, -signal.SIGKILL]
    pictures = [picture(number).tolist() for number in range(6)]
    assert [json.loads(output) for output in outputs[:2]] == [[6, pictures]] * 2
    assert len(list(cache.glob("pixels-*"))) == 1
    assert len(left_behind(cache)) == 1  # of the killed one


def test_what_a_killed_process_left_is_removed_after_a_day(
    table: ImageTable, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    for name, age in (("partial-old", 2 * 86_400), ("partial-new", 60)):
        (cache / name).mkdir(parents=True)
        os.utime(cache / name, (time.time() - age,) * 2)
    open_pixels(table, SIZE, cache=cache)
    assert [path.name for path in left_behind(cache)] == ["partial-new"]


def test_pacs_opens(shared_data: Path, tmp_path: Path) -> None:
    names = sorted((shared_data / "pacs").glob("*/dog/*"))[::200]
    paths = [str(name.relative_to(shared_data / "pacs")) for name in names]
    _, store, bad = open_pixels(table_of(shared_data / "pacs", paths), 32, cache=tmp_path)
    assert bad == []
    assert store.gather(range(len(paths))).float().std(dim=(1, 2, 3)).min() > 1
