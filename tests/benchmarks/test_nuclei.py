"""The score of the study of nuclei is Dice as others compute it."""

from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from torchmetrics.functional.segmentation import dice_score

from discs import dice as documented
from scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


def test_the_score_is_torchmetrics_dice_and_nothing_marked_is_nothing():
    nuclei = load_script(ROOT / "benchmarks" / "segmentation" / "nuclei.py")
    rng = torch.Generator().manual_seed(0)
    outputs, masks = torch.randn(8, 1, 6, 6, generator=rng), torch.zeros(8, 1, 6, 6)
    masks[:6] = (torch.rand(6, 1, 6, 6, generator=rng) > 0.8).float()
    outputs[5], outputs[7] = -1, -1  # nothing marked; in the last image rightly so
    found, true = ((part > 0).long()[:, 0] for part in (outputs, masks))
    kinds = {"include_background": False, "average": "none", "input_format": "index"}
    expected = dice_score(found, true, 2, **kinds)[:, 0]
    assert expected.isnan().tolist() == 7 * [False] + [True]
    for score in (nuclei.dice, documented):
        torch.testing.assert_close(score(outputs, masks)[:7], expected[:7])
        assert score(outputs, masks)[5:].tolist() == [0, 0, 0]
    kept = nuclei.with_nuclei(TensorDataset(outputs, masks))
    assert torch.equal(kept.tensors[1], masks[:6])
