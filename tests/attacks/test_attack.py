"""Attacks on small runs, from the command line to the page."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from typer.testing import CliRunner

from extras import needs
from feddg.attacks.attack import AttackSettings, attack_run, load_public
from feddg.cli import app
from feddg.data.decoding import decode_image
from feddg.errors import DataError, ExperimentError, FeddgError, RunError
from feddg.records import DifferenceRow, InversionRow, ReconstructionRow
from feddg.report.page import write_report
from feddg.runs.reading import read_run
from trained_runs import write_images

pytestmark = [
    needs("torchmetrics"),
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
]


def changed(settings, **fields):
    return AttackSettings(**vars(settings) | fields)


@pytest.mark.parametrize(
    ("method", "kind"),
    [("pardon", "server"), ("elcfs", "server"), ("fpl", "server"), ("pardon", "client")],
)
def test_every_kind_of_statistic_is_attacked_by_both(attack, method, kind):
    rows = attack(method, kind)
    drawn = [row for row in rows if isinstance(row, ReconstructionRow)]
    assert {row.attacker for row in rows} == {kind}
    assert {row.fed for row in drawn} == {"sent", "sample", "unrelated"}
    assert {row.domain for row in drawn} == {"ink", "chalk", "photo", "all"}
    by_domain = {}
    for row in drawn:
        by_domain.setdefault(row.domain, set()).add(row.images)
        assert 0 <= row.rank <= 1
        assert row.psnr > 3
        assert 0 < row.scores["PD[compact]"] < 2
    assert all(len(counts) == 1 for counts in by_domain.values()), "all sides count the same"
    assert {row.metric for row in rows if isinstance(row, DifferenceRow)} >= {"psnr", "rank"}


def test_per_image_entries_that_were_sent_are_the_images_own(attack):
    """ELCFS sends amplitudes of single images: what was sent and the image's own are one."""
    rows = attack("elcfs", "server")
    gaps = {row.metric: row.mean for row in rows if isinstance(row, DifferenceRow)}
    assert gaps["psnr"] == pytest.approx(0, abs=1e-4)


def test_what_no_client_sends_is_not_attacked(runs, place, quick):
    train = {"rounds": 1, "local_steps": 1, "trainable": "head", "augmentation": "none"}
    folder = runs("fedavg", train=train)
    for kind in ("server", "membership"):
        with pytest.raises(RunError, match="no client sends update/statistics"):
            attack_run(folder, kind, changed(quick, entry="statistics"), cache=place / "cache")


def test_an_attack_is_a_function_of_its_seed(attack):
    first = attack("pardon", "server")
    assert attack("pardon", "server", again=True) == first


def test_updates_are_inverted(attack):
    rows = attack("fedavg", "update")
    assert all(isinstance(row, InversionRow) for row in rows)
    assert [(row.batch_size, row.images, row.updates) for row in rows] == [(1, 2, 2), (2, 4, 2)]
    assert all(0 < row.cosine <= 1 for row in rows)


# --- what is kept, and what is refused ------------------------------------------------------------


def test_rows_are_kept_and_replaced_and_shown(attack, runs):
    attack("pardon", "server")
    attack("pardon", "update")
    rows = attack("pardon", "server", again=True)
    folder = runs("pardon")
    kept = read_run(folder).attacks
    assert [row for row in kept if row.kind != "inversion"] == rows or set(
        (row.kind, row.key) for row in rows
    ) <= {(row.kind, row.key) for row in kept}
    assert len({(row.kind, row.key) for row in kept}) == len(kept)
    pictures = dict((path.name, text) for path, text in read_run(folder).pictures())
    assert "the server" not in pictures["styles.png"]
    assert "draws from statistics/style" in pictures["attack-server-statistics-style.png"]
    page = write_report([folder], folder / "report.html").read_text("utf-8")
    for words in (
        "What left the sites, and what it gives away",
        "A failed attack shows only that this one failed",
        "Differential privacy was not used",
        "drawn by the server",
    ):
        assert words in page


@pytest.mark.parametrize(
    ("method", "kind", "changes", "error", "words"),
    [
        ("fedavg", "server", {}, ExperimentError, "shares no style"),
        ("fedavg", "client", {}, ExperimentError, "shares no style"),
        ("fedavg", "server", {"public": ()}, ExperimentError, "shares no style"),
        ("pardon", "server", {"public": ()}, DataError, "--public"),
        ("pardon", "server", {"public": ("nowhere",)}, DataError, "Cannot read the folder nowhere"),
        ("pardon", "client", {"client": 9}, ExperimentError, "no client 9; the run has 0 to 5"),
        ("pardon", "thief", {}, ExperimentError, "no attack 'thief'"),
    ],
)
def test_bad_input_ends_in_one_line(place, runs, quick, method, kind, changes, error, words):
    changes = {k: tuple(map(Path, v)) if k == "public" else v for k, v in changes.items()}
    with pytest.raises(error, match=words) as caught:
        attack_run(runs(method), kind, changed(quick, **changes), cache=place / "cache")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("few", "3 images are too few to train a generator on; give at least 16"),
        ("empty", "image"),
        ("broken", "image"),
    ],
)
def test_public_images_that_cannot_be_learned_from(place, tmp_path, runs, quick, content, words):
    folder = tmp_path / content
    folder.mkdir()
    if content == "few":
        write_images(folder, 3)
    elif content == "broken":
        (folder / "a.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=words):
        attack_run(
            runs("pardon"), "server", changed(quick, public=(folder,)), cache=place / "cache"
        )


def test_public_images_of_any_size_and_shape_will_do(place, tmp_path, runs, quick):
    for number in range(16):
        shade = (number * 15, 9, 200 - number)
        Image.new("RGB", (2 + 9 * number, 1 + number), shade).save(tmp_path / f"{number}.png")
    rows = attack_run(
        runs("pardon"), "server", changed(quick, public=(tmp_path,)), cache=place / "cache"
    )
    assert {row.public for row in rows if isinstance(row, ReconstructionRow)} == {16}


def test_of_many_public_images_no_more_are_read_than_are_used(tmp_path, monkeypatch):
    """Photographs of a whole disk would not fit into memory."""
    write_images(tmp_path, 20)
    everything, read = load_public([tmp_path], 8), []

    def decoded(path, *how):
        read.append(path)
        return decode_image(path, *how)

    monkeypatch.setattr("feddg.attacks.attack.decode_image", decoded)
    assert torch.equal(load_public([tmp_path], 8, 6), everything[[0, 3, 6, 10, 13, 16]])
    assert len(read) == 6


@pytest.fixture
def summed(runs):
    """A run whose server saw only sums."""
    model = {"backbone": "cnn_gn", "weights": None, "normalization": "frozen"}
    return runs("fedavg", model=model, defences=["secure_aggregation"])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("update", "sums of updates alone .secure aggregation.: there is no single update"),
        ("membership", "sums of updates alone .secure aggregation., and nothing else"),
        ("server", "shares no style"),
    ],
)
def test_where_the_server_saw_only_sums_there_is_nothing_single_to_attack(
    place, summed, quick, kind, words
):
    with pytest.raises(FeddgError, match=words):
        attack_run(summed, kind, quick, cache=place / "cache")


def test_of_a_table_of_features_membership_is_asked_and_nothing_is_drawn(place, runs, quick):
    rows = [f"{'abc'[n % 3]},{n // 3 % 2},{n // 3 % 2 + n / 99},{n % 5}" for n in range(180)]
    table = place / "features.csv"
    table.write_text("\n".join(["domain,label,f0,f1", *rows]), encoding="utf-8")
    folder = runs("fedavg", data={"source": "features", "root": str(table)}, hold_out="c")
    for kind in ("server", "update"):
        with pytest.raises(ExperimentError, match="a table of features has no images"):
            attack_run(folder, kind, quick, cache=place / "cache")
    assert attack_run(folder, "membership", quick, cache=place / "cache")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("update", "ridge trains nothing: clients send sums .*: there is no single update"),
        ("membership", "ridge trains nothing: .*, and nothing else"),
        ("server", "ridge shares no style"),
    ],
)
def test_sums_over_images_are_no_update_of_training(place, runs, quick, kind, words):
    """A search for a gradient would find nothing in them, and say that nothing is given away."""
    folder = runs("ridge", model={"backbone": "cnn", "weights": None})
    with pytest.raises(FeddgError, match=words):
        attack_run(folder, kind, quick, cache=place / "cache")


def test_no_run_no_attack(place, tmp_path, quick):
    with pytest.raises(RunError, match="holds no run"):
        attack_run(tmp_path, "update", quick, cache=place / "cache")


@pytest.mark.parametrize(
    "fields",
    [
        {"batch_sizes": (0,)},
        {"batch_sizes": (257,)},
        {"optimizer": "lbfgs"},
        {"targets": 1},
        {"most_public": 15},
        {"steps": -1},
        {"updates": 0},
        {"iterations": 0},
        {"membership": {"clients": 0}},
        {"membership": {"images": 3}},
        {"membership": {"shadows": -1}},
    ],
)
def test_impossible_settings_are_refused(fields):
    with pytest.raises(ValidationError, match=next(iter(fields))):
        AttackSettings(**fields)


@pytest.mark.parametrize(
    "option", [("--targets", "0"), ("--shadows", "-1"), ("--optimizer", "lbfgs")]
)
def test_the_command_refuses_them_in_one_line(tmp_path, option):
    command = ["privacy", "attack", str(tmp_path), "--kind", "server", *option]
    error = CliRunner().invoke(app, command).exception
    assert isinstance(error, ExperimentError)
    assert str(error).startswith(f"{option[0][2:]}: ")
    assert "\n" not in str(error)


def test_the_command_says_what_was_found(place, runs, monkeypatch):
    monkeypatch.setenv("FEDDG_CACHE", str(place / "cache"))
    command = ["privacy", "attack", str(runs("pardon")), "--kind", "update", "--updates", "1"]
    command += ["--iterations", "2", "--batch-sizes", "1", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert (row["kind"], row["batch_size"]) == ("inversion", 1)
