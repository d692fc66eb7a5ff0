"""Preparing a run: presets that learn without pretrained weights; memory given back."""

import ctypes
import logging
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy

from feddg.api import compare
from feddg.comparison.plan import Plan, expand_plan, plan_with_weights_at_hand
from feddg.data.partition import partitioned_alike
from feddg.data.splits import ROLES
from feddg.diagnostics import collected, silent
from feddg.errors import WeightsError
from feddg.experiment import Experiment, explain, load_experiment
from feddg.models import backbones
from feddg.runs import beforehand
from feddg.runs.beforehand import forecast, with_weights_at_hand
from feddg.runs.prepare import (
    Images,
    give_memory_back,
    in_process,
    load_images,
)
from federations import federation
from image_folders import noise

FOLDER = {"data": {"source": "folder", "root": str(Path(__file__).parent)}, "hold_out": "c"}


@pytest.mark.parametrize("weights", ["none", None])
def test_no_weights_choose_a_small_network_that_learns(weights: str | None) -> None:
    chosen = Experiment(**FOLDER, model={"weights": weights})
    assert (chosen.model.backbone, chosen.data.image_size, chosen.train.lr) == ("cnn", 64, 1e-3)
    assert chosen.model.normalization == "train"
    found = explain({**FOLDER, "model": {"weights": weights}})
    assert found["train.lr"].source == "preset scratch, without pretrained weights"
    assert found["train.augmentation"].source == "preset folder"


def test_what_the_user_says_stays_and_so_does_a_named_protocol() -> None:
    said = {"model": {"backbone": "resnet18", "weights": None}, "train": {"lr": 0.01}}
    chosen = Experiment(**FOLDER, **said)
    assert (chosen.model.backbone, chosen.train.lr, chosen.data.image_size) == (
        "resnet18",
        0.01,
        64,
    )
    named = Experiment(**FOLDER, preset="fedig", model={"weights": None})
    assert (named.model.backbone, named.train.lr) == ("resnet18", 0.01)
    digits = Experiment(data="digits", hold_out="sketch", model={"weights": None})
    assert digits.id == Experiment(data="digits", hold_out="sketch").id
    pretrained = Experiment(**FOLDER)
    assert (pretrained.model.backbone, pretrained.train.head) == ("efficientnet_lite0", "ridge")
    assert pretrained.model.weights == "imagenet"


@pytest.mark.parametrize(
    ("fields", "head"),
    [
        ({"defences": "median"}, "random"),
        ({"privacy": {"clipping": "fixed"}}, "random"),
        ({"method": "local"}, "random"),
        ({"method": "ridge"}, "random"),
        ({"defences": "median", "train": {"head": "ridge"}}, "ridge"),
    ],
)
def test_a_classifier_from_open_sums_is_the_default_where_nothing_is_to_be_defended(fields, head):
    assert Experiment(**FOLDER, **fields).train.head == head


def test_a_method_s_own_optimizer_wins_over_the_preset() -> None:
    chosen = Experiment(**FOLDER, method="scaffold", model={"weights": None})
    assert (chosen.train.optimizer, chosen.train.lr, chosen.model.backbone) == ("sgd", 0.01, "cnn")


def test_a_complete_experiment_is_left_as_it_is() -> None:
    stored = Experiment(**FOLDER, preset="fedig", model={"weights": None}).model_dump(mode="json")
    again = Experiment(**stored)
    assert (again.model.backbone, again.data.image_size) == ("resnet18", 224)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be downloaded."""

    def fetch(backbone: str, weights: str) -> None:
        raise WeightsError(f"cannot download ImageNet weights for {backbone!r}")

    monkeypatch.setattr(beforehand, "require_weights", fetch)


def test_a_run_from_scratch_says_so_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    chosen = Experiment(**FOLDER, model={"weights": None})
    assert with_weights_at_hand(chosen) is chosen
    (line,) = caplog.messages
    assert "No pretrained weights: cnn at 64 pixels" in line
    assert "--weights imagenet" in line
    caplog.clear()
    with_weights_at_hand(Experiment(data={"source": "digits"}, hold_out="sketch"))
    assert not caplog.messages


@pytest.mark.usefixtures("offline")
def test_weights_that_cannot_be_had_lead_there_unless_they_were_asked_for(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    chosen = with_weights_at_hand(Experiment(**FOLDER))
    assert chosen.id == Experiment(**FOLDER, model={"weights": None}).id
    first, second = caplog.messages
    assert "cannot download" in first
    assert "learns from scratch" in second
    caplog.clear()
    file = tmp_path / "e.yaml"
    file.write_text("data: {source: folder}\nmodel: {weights: imagenet}\n")
    for asked in (
        Experiment(**FOLDER, model={"weights": "imagenet"}),
        Experiment(**FOLDER, backbone="resnet18"),
        Experiment(**FOLDER, preset="folder"),
        load_experiment(file, {"hold_out": "c"}),
        Experiment(**FOLDER).model_copy(update={"seed": 1}),  # a copy says all it holds
    ):
        assert with_weights_at_hand(asked) is asked
    assert not caplog.messages


@pytest.mark.usefixtures("offline")
def test_a_comparison_says_it_once_and_writes_it_into_its_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = {"method": "fedprox", "experiment": {"model": {"weights": "imagenet"}}}
    plan = Plan(base={"data": FOLDER["data"]}, methods=["fedavg", own], hold_out="lodo")
    without = plan_with_weights_at_hand(plan)
    assert without.base["model"] == {"weights": None}
    assert without.methods == plan.methods
    assert "No pretrained weights: cnn at 64 pixels" in caplog.text
    caplog.clear()
    assert plan_with_weights_at_hand(without) == without
    assert "No pretrained weights: cnn at 64 pixels" in caplog.text
    several = Plan(data=[{"name": "own", **FOLDER["data"]}], methods=plan.methods, hold_out=["c"])
    weights = [c.experiment.model.weights for c in expand_plan(plan_with_weights_at_hand(several))]
    assert weights == [None, "imagenet"]
    compared = plan.model_copy(update={"settings": {"model.weights": ("imagenet", None)}})
    assert plan_with_weights_at_hand(compared) == compared


@pytest.mark.usefixtures("offline")
def test_a_papers_plan_stops_before_its_first_run_where_its_weights_are_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """It does not become the experiment of a small network."""
    asked: list[str] = []

    def fetch(backbone: str, weights: str, size: int | None = None) -> None:
        asked.append(backbone)
        raise WeightsError(f"cannot download ImageNet weights for {backbone!r}")

    monkeypatch.setattr(backbones, "_pretrained", fetch)
    monkeypatch.chdir(tmp_path)
    for domain, label in product(("photo", "art_painting", "cartoon", "sketch"), ("dog", "horse")):
        (tmp_path / "PACS" / domain / label).mkdir(parents=True)
        for number in range(20):
            file = tmp_path / "PACS" / domain / label / f"{number}.png"
            Image.new("RGB", (8, 8), (number, 0, 0)).save(file)
    plan = "pardon/table1_pacs"
    few = {"data": {"root": "PACS"}, "clients": [[4, 2]]}
    with pytest.raises(WeightsError, match=r"ImageNet weights for 'resnet50'"):
        compare(plan, **few)
    assert asked == ["resnet50"] * 2  # not for each of 84 runs
    assert not (tmp_path / "comparisons").exists()
    assert "scratch" not in caplog.text
    assert compare(plan, **few, dry_run=True).plan.name == "pardon_table1_pacs"
    scratch = compare(plan, **few, model={"weights": None}, dry_run=True)
    assert {cell.experiment.model.backbone for cell in scratch.missing} == {"cnn"}  # as was asked


def test_a_plan_on_features_counts_them_and_keeps_its_data_set(tmp_path: Path) -> None:
    table = tmp_path / "features.csv"
    table.write_text("x,y,label,domain\n" + "1,2,a,n\n2,1,b,n\n1,3,a,s\n3,1,b,s\n")
    plan = Plan(base={"data": "features", "root": str(table), "model": "features"}, hold_out=["n"])
    base = plan_with_weights_at_hand(plan).base
    assert base["data"] == {"source": "features", "root": str(table), "features": 2}
    assert base["model"] == {"backbone": "features", "weights": None}


def test_a_comparison_keeps_weights_that_can_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(beforehand, "require_weights", lambda backbone, weights: None)
    plan = Plan(base={"data": FOLDER["data"]}, hold_out="lodo")
    assert plan_with_weights_at_hand(plan) is plan
    assert not caplog.messages


def test_balanced_classes_count_alike_by_the_clients_own_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from feddg.settings import TrainSettings

    small = federation(train=TrainSettings(class_weights="balanced", batch_size=4))
    client = small.client()
    labels = torch.tensor([0, 0, 0, 1])
    client.training = type("Held", (), {"labels": labels})()
    logits = torch.randn(4, 3, generator=torch.manual_seed(0))
    weights = torch.tensor([4 / (2 * 3), 4 / (2 * 1), 4.0 / 2])
    expected = cross_entropy(logits, labels, weights)
    torch.testing.assert_close(client.task_loss(logits, labels), expected)
    each = cross_entropy(logits, labels, reduction="none")
    alike = (each[:3].mean() + each[3]) / 2  # every class the client holds counts as much
    torch.testing.assert_close(expected, alike)
    with caplog.at_level(logging.WARNING):
        assert all(torch.isfinite(value).all() for value in small.run(1).values())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's own function")
def test_freed_memory_stays_for_the_next_step():
    # A process of its own: what others did with its memory decides where the next piece lies. Of
    # five steps one is enough; without it every one of them faults.
    code = """
import resource, torch
from feddg.federation.federation import keep_memory
keep = keep_memory()
faults = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)  # 64 MB, more than glibc ever keeps by itself
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults[1:]) if keep else "another C library")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if not done.stdout.strip().isdigit():
        pytest.skip("this C library is not glibc")
    assert int(done.stdout) < 100  # of 16,384 pages


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's own function")
def test_freed_memory_is_given_back():
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("this C library has no malloc_trim")
    pieces = [bytearray(2_000) for _ in range(20_000)]
    kept = pieces[::500]  # holes of a megabyte between them
    del pieces
    assert give_memory_back()
    assert kept


def test_a_plan_counts_tiles_as_the_run_does(tmp_path):
    """As many clients as there are tiles, and more than there are files."""
    for domain in "ab":
        for number in range(2):
            file = tmp_path / "images" / domain / "xy"[number] / "0.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            noise(number + 2 * (domain == "b"), 32).save(file)
    chosen = Experiment(
        data={"root": tmp_path / "images", "tile": 16, "image_size": 16, "id_val": 0, "id_test": 0},
        hold_out="b",
        model={"backbone": "cnn", "weights": None},
        clients={"number": 2, "heterogeneity": 1.0},
    )
    loaded = load_images(chosen, tmp_path / "cache", silent)
    found = forecast(chosen, tmp_path / "cache")
    assert found.splits == {role: len(getattr(loaded.splits, role)) for role in ROLES}
    assert found.splits["train"] == 8
    assert found.pixel_bytes == 16 * 3 * 16**2


@pytest.mark.parametrize("tile", ["#x{}y0w8h8", "-{}"])
def test_tiles_that_a_table_of_features_names_are_not_independent(tmp_path, tile):
    rows = ["path,label,domain,a"]
    for number, domain in product(range(40), "ab"):
        name = f"{domain}{number % 4}{tile.format(8 * (number // 4))}"
        rows.append(f"{name},{'xy'[number % 2]},{domain},{number / 40 + (domain == 'b')}")
    (tmp_path / "t.csv").write_text("\n".join(rows) + "\n")
    chosen = Experiment(
        data={"source": "features", "root": tmp_path / "t.csv", "features": 1, "id_val": 0},
        hold_out="b",
        clients={"number": 2},
        method="ridge",
    )
    evaluation = in_process(chosen, tmp_path / "cache").evaluation
    if "#" in tile:
        assert len(set(evaluation.groups[evaluation.splits["test"]].tolist())) == 4
    else:
        assert evaluation.groups is None


@pytest.mark.parametrize(("every", "said"), [(2, False), (3, True), (20, True)])
def test_a_choice_among_one_model_is_said(every: int, said: bool, tmp_path: Path) -> None:
    data = {"source": "digits", "image_size": 8, "id_val": 0.1}
    train = {"local_steps": 3, "select_every": every}
    chosen = Experiment(data=data, hold_out="sketch", clients=2, train=train)
    with collected() as found:
        in_process(chosen, tmp_path)
    text = [each.text for each in found if each.code == "selects-nothing"]
    assert len(text) == said
    assert all("no client takes more than 3 steps" in each for each in text)


def test_clients_of_a_few_classes_choose_by_images_of_these(tmp_path: Path) -> None:
    def dealt(**clients: object) -> Images:
        data = {"source": "digits", "image_size": 8, "id_val": 0.2}
        clients = {"number": 10, "partition": "domain", **clients}
        return load_images(
            Experiment(data=data, hold_out="sketch", clients=clients), tmp_path, silent
        )

    def classes_of_both(images: Images) -> list[tuple[set[int], set[int]]]:
        both = ((one.labels, one.validation.labels) for one in images)
        return [(set(a.tolist()), set(b.tolist())) for a, b in both]

    images = dealt(shards=2)
    for held, validated in classes_of_both(images):
        assert validated
        assert validated <= held
        assert len(held) < 10
    dealt_once = numpy.concatenate([one.validation.rows.numpy() for one in images])
    assert sorted(dealt_once.tolist()) == sorted(images.splits.id_val.tolist())
    # Without such a rule as ever, by domain alone.
    plain = dealt()
    domains = plain.table.domains[plain.splits.id_val]
    expected = partitioned_alike(plain.partition, domains, plain.seed)
    for one, places in zip(plain, expected):
        assert one.validation.rows.tolist() == plain.splits.id_val[places].tolist()
