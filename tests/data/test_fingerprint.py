"""What the images of a run are, in a file that is compact and compared."""

import os

from PIL import Image

from feddg.data import fingerprint
from feddg.data.fingerprint import ImagesFile


def test_images_that_are_drawn_are_compared_too(tmp_path):
    before = ImagesFile(count=1, labels="l", rendered="p", folders={})
    assert not fingerprint.difference(before, before)
    changed = before.model_copy(update={"rendered": "q"})
    assert "rows of their table have changed" in str(fingerprint.difference(before, changed))


def test_a_file_that_cannot_be_read_is_part_of_it(tmp_path):
    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    os.mkfifo(tmp_path / "pipe.png")
    found = fingerprint.content_hashes(tmp_path, ["a.png", "gone.png", "pipe.png"], None)
    assert found["gone.png"] == found["pipe.png"] == (-1, "")
    assert found["a.png"][0] == (tmp_path / "a.png").stat().st_size
