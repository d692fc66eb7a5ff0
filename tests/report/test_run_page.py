"""Every metric by domain on a page: averaged, pooled, worst, and the images behind it."""

import numpy

from feddg.evaluation.metrics import Predictions, measure
from feddg.report.blocks import Prose, Table
from feddg.report.run_page import metrics_section
from feddg.runs.reading import read_run
from feddg.text import MISSING, percent
from run_folders import FolderMaker


class Measured(FolderMaker):
    """A run whose rows have metrics beside accuracy."""

    def _evaluation(self, round_, split, index, domain, weights):
        row = super()._evaluation(round_, split, index, domain, weights)
        found = {
            "macro_f1": 0.5 + index / 10,
            "auroc": 0.9 - index / 10,
            "calibration_error": 0.1 + index / 5,
        }
        return row.model_copy(update={"metrics": found})


class Thin(Measured):
    """A run whose test images are few of one class and none of another."""

    def confusion(self):
        size = len(self.classes)
        return [[3, *[0] * (size - 1)], [0] * size, *[[30] * size for _ in range(size - 2)]]


def test_domains_are_averaged_pooled_and_the_worst_is_named(tmp_path):
    maker = Measured(tmp_path / "run", test=["a", "b"], rounds=2)
    section = metrics_section(read_run(maker.write()))
    (table,) = section.blocks
    assert isinstance(table, Table)
    assert [column.heading for column in table.columns] == [
        *("Split", "Domain", "Images", "Accuracy", "Macro-F1", "AUROC", "ECE", "Smallest class")
    ]
    rows = {row[1].text: [cell.text for cell in row[2:]] for row in table.rows[:5]}
    assert rows["mean of domains (2)"][2:5] == ["55.0", "85.0", "20.0"]
    assert rows["worst domain (2)"][2:5] == ["50.0", "80.0", "30.0"]
    pooled = measure(Predictions(2 * numpy.array(maker.confusion())))["macro_f1"]
    assert rows["all images pooled (2)"][2:5] == [percent(pooled), MISSING, MISSING]
    support = [sum(row) for row in maker.confusion()]
    assert rows["a"][-1].endswith(f": {min(support)}")


def test_classes_with_few_images_or_none_are_warned_of(tmp_path):
    maker = Thin(tmp_path / "run", test=["ink"], rounds=2)
    notice, table = metrics_section(read_run(maker.write())).blocks
    assert isinstance(notice, Prose)
    assert notice.notice
    few = f"{maker.classes[0]} (3), {maker.classes[1]} (0)"
    assert f"fewer than 20 images, or none: test ink: {few}." in notice.text
    assert table.rows[0][-1].text.endswith(f"1 of {len(maker.classes)} classes without any")


def test_runs_that_wrote_accuracies_alone_have_no_such_section(folder_maker):
    maker = folder_maker("plain")
    maker.confusion = lambda: None
    found = metrics_section(read_run(maker.write()))
    assert found is None
