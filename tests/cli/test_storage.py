"""`feddg cache`: counts what is feddg's, removes nothing else."""

import json

import pytest


def held(feddg):
    code, shown, _ = feddg("cache", "--json")
    assert code == 0
    found = json.loads(shown)["kinds"]
    return {kind: row["entries"] for kind, row in found.items() if row["entries"]}


@pytest.fixture
def filled(feddg, image_folder, tmp_path):
    """A cache with decoded images, and something that is not feddg's."""
    assert feddg("data", "inspect", "--root", image_folder, "-q")[0] == 0
    cache = tmp_path / "cache"
    (cache / f"checked-{'0' * 32}.json").write_text("{}")
    (cache / f"{'0' * 24}-twin-1.npy").write_bytes(b"12345")
    (cache / f"partial-{'0' * 32}").mkdir()
    (cache / "notes.txt").write_text("mine")
    (cache / "pixels-mine").mkdir()
    return cache


def test_it_says_where_and_how_much(feddg, filled):
    assert held(feddg) == {
        "pixels": 1,
        "checks": 1,
        "hashes": 1,
        "twins": 1,
        "partial": 1,
        "other": 2,
    }
    code, shown, _ = feddg("cache")
    assert code == 0
    assert str(filled) in shown
    assert "5 bytes" in shown
    found = json.loads(feddg("cache", "--json")[1])["kinds"]
    assert found["pixels"]["bytes"] == sum(
        file.stat().st_size for file in filled.glob("pixels-*/*") if file.is_file()
    )


def test_clearing_removes_what_is_asked_for_and_never_what_is_not_ours(feddg, filled):
    assert feddg("cache", "clear", "--kind", "twins", "--yes")[0] == 0
    assert held(feddg) == {"pixels": 1, "checks": 1, "hashes": 1, "partial": 1, "other": 2}
    assert feddg("cache", "clear", "-y")[0] == 0
    assert held(feddg) == {"other": 2}
    assert {path.name for path in filled.iterdir()} == {"notes.txt", "pixels-mine"}
    assert "nothing to remove" in feddg("cache", "clear", "-y")[1]


def test_it_asks_first(feddg, filled, monkeypatch):
    monkeypatch.setattr("typer.confirm", lambda text, abort: (_ for _ in ()).throw(SystemExit(1)))
    assert feddg("cache", "clear")[0] == 1
    assert held(feddg)["pixels"] == 1


def test_a_cache_that_is_no_folder_is_one_line(feddg, tmp_path, monkeypatch):
    assert held(feddg) == {}
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "file"))
    for command in (["cache"], ["cache", "clear", "-y"]):
        code, _, errors = feddg(*command)
        assert code == 1
        assert "cannot be read" in errors
        assert len(errors.splitlines()) == 1
    assert feddg("cache", "clear", "--kind", "all")[0] == 2
