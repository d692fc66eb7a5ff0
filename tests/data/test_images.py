import logging
from pathlib import Path

import numpy as np
import pytest

from feddg.data.images import ImageTable, from_folder
from feddg.errors import DataError


def touch(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"")
    return root


def small_table() -> ImageTable:
    return ImageTable(
        paths=("a/x/1", "a/x/2", "a/y/1", "b/y/1"),
        labels=np.array([0, 0, 1, 1]),
        domains=np.array([0, 0, 0, 1]),
        class_names=("x", "y"),
        domain_names=("a", "b"),
        images=np.arange(4, dtype=np.uint8).reshape(4, 1, 1, 1).repeat(3, axis=3),
    )


def test_folder_is_listed_in_order_of_domain_class_and_name(tmp_path: Path) -> None:
    touch(tmp_path, "sketch/dog/b.png", "sketch/dog/a.JPG", "photo/dog/z.jpeg", "photo/cat/1.webp")
    table = from_folder(tmp_path)
    assert table.paths == (
        "photo/cat/1.webp",
        "photo/dog/z.jpeg",
        "sketch/dog/a.JPG",
        "sketch/dog/b.png",
    )
    assert table.domain_names == ("photo", "sketch")
    assert table.class_names == ("cat", "dog")
    assert table.domains.tolist() == [0, 0, 1, 1]
    assert table.labels.tolist() == [0, 1, 1, 1]
    assert table.domains.dtype == table.labels.dtype == np.int64
    assert table.root == tmp_path
    assert all((tmp_path / path).is_file() for path in table.paths)


def test_every_image_suffix_counts_and_nothing_else_does(tmp_path: Path) -> None:
    suffixes = ["jpg", "jpeg", "png", "bmp", "gif", "tif", "tiff", "webp", "TIF"]
    touch(tmp_path, *(f"d/c/image_{suffix}.{suffix}" for suffix in suffixes))
    touch(tmp_path, "d/c/notes.txt", "d/c/.hidden.jpg", "d/.cache/a.jpg", ".git/c/a.jpg")
    touch(tmp_path, "d/stray.jpg", "d/c/deeper/a.jpg", "list.txt", "d/c/Thumbs.db")
    table = from_folder(tmp_path)
    assert sorted(path.rsplit(".")[-1] for path in table.paths) == sorted(suffixes)
    assert table.class_names == ("c",)


def test_a_folder_named_like_an_image_is_not_listed(tmp_path: Path) -> None:
    touch(tmp_path, "d/c/album.jpg/inside.txt", "d/c/a.jpg")
    assert from_folder(tmp_path).paths == ("d/c/a.jpg",)


def test_unreadable_contents_are_listed_since_nothing_is_decoded(tmp_path: Path) -> None:
    touch(tmp_path, "d/c/empty.jpg")
    (tmp_path / "d/c/text.jpg").write_text("not an image")
    assert from_folder(tmp_path).paths == ("d/c/empty.jpg", "d/c/text.jpg")


def test_unusual_names_survive(tmp_path: Path) -> None:
    touch(tmp_path, "Real World/Café au lait/ünï 1.jpg")
    table = from_folder(tmp_path)
    assert (tmp_path / table.paths[0]).is_file()
    assert table.domain_names == ("Real World",)


def test_a_name_in_two_forms_of_unicode_is_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mac, linux = "e\u0301pithe\u0301lium", "\xe9pith\xe9lium"
    touch(tmp_path, f"Le\u0301on/{mac}/1.png", f"L\xe9a/{linux}/2.png", "L\xe9a/cat/3.png")
    table = from_folder(tmp_path)
    assert table.class_names == ("cat", linux)
    assert table.domain_names == ("L\xe9a", "L\xe9on")
    assert table.domain_id("Le\u0301on") == 1
    assert all((tmp_path / path).is_file() for path in table.paths)
    assert not caplog.records


def test_empty_classes_and_domains_are_left_out_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    touch(tmp_path, "photo/dog/1.jpg", "sketch/cat/1.jpg", "splits/list.txt")
    (tmp_path / "photo/cat").mkdir()
    (tmp_path / "photo/unicorn").mkdir()
    with caplog.at_level(logging.WARNING, logger="feddg"):
        table = from_folder(tmp_path)
    assert table.class_names == ("cat", "dog")
    assert table.domain_names == ("photo", "sketch")
    assert table.counts().tolist() == [[0, 1], [1, 0]]
    assert "unicorn" in caplog.text
    assert "splits" in caplog.text
    assert "'cat'" not in caplog.text, "a class another domain has is no fault"


def test_missing_root_names_the_path_and_the_layout(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere does not exist.*<domain>/<class>"):
        from_folder(tmp_path / "nowhere")


def test_root_that_is_a_file(tmp_path: Path) -> None:
    touch(tmp_path, "images.zip")
    with pytest.raises(DataError, match=r"images\.zip .* not a folder"):
        from_folder(tmp_path / "images.zip")


@pytest.mark.parametrize(
    ("paths", "hint"),
    [
        ([], "holds no folders"),
        (["photo/dog/readme.txt"], "folders photo, without images"),
        (["dog/1.jpg"], "dog/1.jpg"),
        (["PACS/photo/dog/1.jpg"], "PACS/photo/dog/1.jpg"),
    ],
)
def test_root_of_another_layout_says_what_is_there(
    tmp_path: Path, paths: list[str], hint: str
) -> None:
    with pytest.raises(DataError, match="No images were found") as caught:
        from_folder(touch(tmp_path, *paths))
    assert hint in str(caught.value)


def test_take_keeps_names_and_follows_the_rows() -> None:
    taken = small_table().take([3, 0])
    assert taken.paths == ("b/y/1", "a/x/1")
    assert taken.labels.tolist() == [1, 0]
    assert taken.domains.tolist() == [1, 0]
    assert taken.images is not None
    assert taken.images[:, 0, 0, 0].tolist() == [3, 0]
    assert taken.domain_names == ("a", "b")
    assert len(taken) == 2
    assert len(small_table().take([])) == 0


def test_counts_are_images_per_domain_and_class() -> None:
    assert small_table().counts().tolist() == [[2, 1], [0, 1]]
    assert small_table().take([0]).counts().tolist() == [[1, 0], [0, 0]]


def named(*names: str) -> ImageTable:
    none = np.zeros(0, dtype=np.int64)
    return ImageTable((), none, none, ("c",), names, root=Path("."))


def test_unknown_domain_suggests_the_nearest_and_lists_all() -> None:
    with pytest.raises(DataError, match=r"'skech' \(did you mean 'sketch'\?\).*photo, sketch"):
        named("photo", "sketch").domain_id("skech")
    with pytest.raises(DataError, match="'c'"):
        named("cartoon", "clipart").domain_id("c")
    with pytest.raises(DataError, match="feddg compare --hold-out lodo"):
        named("photo", "sketch").domain_id("all")


def test_a_class_for_a_domain_is_said() -> None:
    none = np.zeros(0, dtype=np.int64)
    swapped = ImageTable((), none, none, ("photo", "sketch"), ("dog", "cat"), root=Path("."))
    with pytest.raises(DataError, match="ROOT/DOMAIN/CLASS"):
        swapped.domain_id("Photo")


def test_columns_of_different_length_or_out_of_range_are_refused() -> None:
    one, none = np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    with pytest.raises(ValueError, match="labels"):
        ImageTable(("a",), none, one, ("c",), ("d",), root=Path("."))
    with pytest.raises(ValueError, match="domains"):
        ImageTable(("a",), one, one + 1, ("c",), ("d",), root=Path("."))
    with pytest.raises(ValueError, match="root"):
        ImageTable(("a",), one, one, ("c",), ("d",))
