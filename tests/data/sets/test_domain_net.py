"""DomainNet in its layouts."""

import logging
from pathlib import Path

import pytest

import published_trees as trees
from feddg.data.data_set import load_source
from feddg.diagnostics import collected
from feddg.errors import DataError
from published_trees import by_split, rows


@pytest.mark.parametrize("make", [trees.domain_net_folders, trees.domain_net_wilds])
def test_domain_net_without_lists_numbers_classes_as_folder_readers_do(
    make, tmp_path: Path
) -> None:
    table = load_source("domain_net", make(tmp_path))
    assert table.class_names == trees.DOMAIN_NET_CLASSES
    assert table.split is None


def test_domain_net_with_lists_has_their_labels_and_split(tmp_path: Path) -> None:
    table = load_source("domain_net", trees.domain_net_lists(tmp_path))
    assert table.class_names == tuple(sorted(trees.DOMAIN_NET_CLASSES, key=str.lower))
    assert by_split(table) == {"train": 6 * 5 * 2, "id_test": 6 * 5 * 2}
    for path, name, domain in rows(table):
        assert path.startswith(f"{domain}/{name}/")


def test_domain_net_without_one_of_its_lists_says_that_none_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = trees.domain_net_lists(tmp_path)
    next(root.rglob("sketch_test.txt")).unlink()
    assert load_source("domain_net", tmp_path).split is None
    assert any("none is used" in line for line in caplog.messages)


def test_mini_domain_net_needs_its_lists(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no splits_mini/.*feddg data get mini_domain_net"):
        load_source("mini_domain_net", trees.domain_net_folders(tmp_path))
    table = load_source("mini_domain_net", trees.mini_domain_net(tmp_path / "mini"))
    assert table.domain_names == ("clipart", "painting", "real", "sketch")
    assert by_split(table) == {"train": 4 * 5 * 2, "id_test": 4 * 5 * 2}


@pytest.mark.parametrize("beside", [True, False])
def test_domain_net_leaves_listed_duplicates_out(
    tmp_path: Path, beside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    root = trees.domain_net_folders(tmp_path / "images")
    whole = load_source("domain_net", root)
    out = [whole.paths[0], whole.paths[7]]
    name = "domain_net_duplicates.txt"
    file = root / "domain_net" / name if beside else tmp_path / "mine.txt"
    file.write_text("\n".join(out) + "\n")
    options = {} if beside else {"duplicates": file}
    with caplog.at_level(logging.WARNING, logger="feddg"):
        table = load_source("domain_net", root, **options)
    assert set(whole.paths) - set(table.paths) == set(out)
    assert "2 images left out" in caplog.text


def test_mini_domain_net_says_what_the_list_of_copies_takes(tmp_path: Path) -> None:
    trees.mini_domain_net(tmp_path)
    path = load_source("mini_domain_net", tmp_path).paths[0]
    (tmp_path / "domain_net_duplicates.txt").write_text(f"{path}\n")
    with collected() as said:
        load_source("mini_domain_net", tmp_path)
    (text,) = [one.text for one in said if one.code == "images-left-out"]
    assert text.startswith("Mini-DomainNet: 1 image left out, of 1 that")


def test_domain_net_with_a_list_of_other_paths_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("somewhere/else.png\n")
    with caplog.at_level(logging.WARNING, logger="feddg"):
        load_source("domain_net", trees.domain_net_folders(tmp_path / "a"), duplicates=file)
    assert "0 images left out, of 1 that" in caplog.text


@pytest.mark.parametrize("line", ["clipart/x.png 0", "clipart/a/../x.png 0", "clipart/a/x.png"])
def test_domain_net_with_a_broken_list(tmp_path: Path, line: str) -> None:
    trees.domain_net_lists(tmp_path)
    with (tmp_path / "domainnet/real_test.txt").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(DataError, match=r"line 11 of .*real_test\.txt"):
        load_source("domain_net", tmp_path)


def test_domain_net_with_a_label_of_two_classes(tmp_path: Path) -> None:
    trees.domain_net_lists(tmp_path)
    with (tmp_path / "domainnet/real_test.txt").open("a") as file:
        file.write("real/cello/x.png 0\n")
    with pytest.raises(DataError, match=r"line 11 of .*real_test.txt is .real/cello/x.png 0"):
        load_source("domain_net", tmp_path)
