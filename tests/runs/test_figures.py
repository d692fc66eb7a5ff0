"""Pictures of the unseen domain and of the surest mistakes show what their captions say."""

import json

import numpy as np
import torch
from PIL import Image

from feddg.data.pixels import ArrayPixels
from feddg.evaluation.accuracy import Evaluation
from feddg.runs.figures import SHOWN, draw_unseen, surest_mistakes


class ByBrightness(torch.nn.Module):
    """Sure of class 1 for bright images, of class 0 for dark ones."""

    def forward(self, images):
        bright = 8 * (images.mean((1, 2, 3)) - 0.5)
        return torch.stack([-bright, bright], 1)


def by_brightness(found):
    return lambda rows: found.predict(ByBrightness(), rows)


def evaluation(labels, values, splits=("test",)):
    pixels = np.repeat(np.array(values, np.uint8)[:, None], 8 * 8 * 3, 1).reshape(-1, 8, 8, 3)
    rows = np.arange(len(values))
    return Evaluation(
        ArrayPixels(pixels),
        {split: rows for split in splits},
        np.array(labels),
        np.zeros(len(values), np.int64),
        ("sketch",),
        2,
        4,
        torch.device("cpu"),
    )


def test_the_surest_mistakes_come_first_and_right_answers_never():
    logits = torch.tensor([[4.0, 0.0], [0.0, 1.0], [9.0, 0.0], [0.0, 3.0]])
    wrong, sureness, taken = surest_mistakes(logits, torch.tensor([1, 0, 0, 0]))
    assert wrong.tolist() == [0, 3, 1]
    assert taken.tolist() == [0, 1, 1]
    torch.testing.assert_close(sureness, torch.sigmoid(torch.tensor([4.0, 3.0, 1.0])))
    assert (
        len(surest_mistakes(torch.zeros(40, 2) + torch.tensor([1.0, 0]), torch.ones(40))[0])
        == SHOWN
    )


def test_the_pictures_show_the_images_that_the_captions_name(tmp_path):
    found = evaluation([0, 0, 1, 1], [10, 250, 240, 20])
    draw_unseen(tmp_path, found, by_brightness(found), ("dark<", "bright"), seed=1)
    captions = json.loads((tmp_path / "captions.json").read_text())
    assert list(captions) == ["unseen.png", "mistake-01.png", "mistake-02.png"]
    assert "sketch, which no client trained on" in captions["unseen.png"]
    told = [captions[f"mistake-0{place}.png"] for place in (1, 2)]
    assert told == ["dark< taken for bright (100%)", "bright taken for dark< (100%)"]
    pictures = [Image.open(tmp_path / f"mistake-0{place}.png").convert("L") for place in (1, 2)]
    assert [np.asarray(picture).mean() for picture in pictures] == [250, 20]


def test_pictures_of_earlier_mistakes_go(tmp_path):
    for labels in ([0, 0, 1, 1], [0, 1, 1, 1]):
        found = evaluation(labels, [10, 250, 240, 20])
        draw_unseen(tmp_path, found, by_brightness(found), ("a", "b"), seed=1)
    assert {path.name for path in tmp_path.glob("*.png")} == {"unseen.png", "mistake-01.png"}


def test_without_a_test_domain_or_a_mistake_there_is_no_such_picture(tmp_path):
    found = evaluation([0], [3], ("id_test",))
    draw_unseen(tmp_path / "a", found, by_brightness(found), ("a", "b"), 0)
    assert not (tmp_path / "a").exists()
    found = evaluation([0, 1], [3, 253])
    draw_unseen(tmp_path, found, by_brightness(found), ("a", "b"), 0)
    assert [path.name for path in tmp_path.glob("*.png")] == ["unseen.png"]
