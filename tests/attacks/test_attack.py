"""Attacks on small runs, from the command line to the page."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from feddg.attacks.attack import AttackSettings, attack_run
from feddg.attacks.senders import (
    STATISTICS,
    MembershipEffort,
    Senders,
    chosen_entries,
    entries_of,
    hashed,
    matched,
)
from feddg.cli import app
from feddg.errors import DataError, ExperimentError, FeddgError, RunError
from feddg.methods.composition import build_method
from feddg.models.backbones import build_network
from feddg.records import DifferenceRow, InversionRow, MembershipRow, ReconstructionRow
from feddg.report import write_report
from feddg.rng import stream
from feddg.runs.model import load_finished_run
from feddg.runs.reading import read_run
from trained_runs import trained_run, write_images

pytest.importorskip("torchmetrics")
SMALL = {
    "data": {"source": "digits", "id_val": 0.6, "id_test": 0},
    "clients": {"number": 6, "partition": "domain"},
    "train": {"rounds": 1, "local_steps": 1, "batch_size": 16, "augmentation": "none"},
    "evaluate": {"every": 1},
}
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacks")
    write_images(folder / "public", 18)
    return folder


@pytest.fixture(scope="module")
def runs(place):
    made = {}

    def run(method, **settings):
        key = json.dumps([method, settings])
        if key not in made:
            chosen = {"name": method, "settings": settings}
            made[key] = trained_run(place / "runs", place / "cache", chosen, **SMALL)
        return made[key]

    return run


@pytest.fixture(scope="module")
def quick(place):
    return AttackSettings(
        public=(place / "public",),
        steps=2,
        targets=12,
        updates=2,
        batch_sizes=(1, 2),
        iterations=4,
        membership=MembershipEffort(clients=2, images=8, shadows=2),
    )


@pytest.fixture
def attack(place, runs, quick):
    def carry_out(method, kind, **settings):
        folder = runs(method, **settings)
        return attack_run(folder, kind, quick, cache=place / "cache")

    return carry_out


# --- what is sent ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("fedavg", []),
        ("feddg-ga", []),
        ("fedprox", []),
        ("ccst", ["statistics/styles"]),
        ("pardon", ["statistics/style"]),
        ("elcfs", ["statistics/amplitudes"]),
        ("fpl", ["update/fpl/prototypes"]),
        ("scaffold", ["update/scaffold/*"]),
        ("fedbn", [STATISTICS]),
        ("fedig", [STATISTICS]),
        ("ccst+fpl", ["statistics/styles", "update/fpl/prototypes"]),
    ],
)
def test_what_a_method_declares_is_what_can_be_attacked(method, keys):
    built = build_method(method, {})
    network = built.network(build_network("cnn", 4, weights=None))
    assert sorted(entries_of(built, network)) == keys


def test_only_rows_that_the_sender_counts_are_rows():
    network = build_network("cnn", 4, weights=None)
    rows = {
        key: entry.has_rows
        for method in ("ccst", "pardon", "elcfs", "fpl")
        for key, entry in entries_of(build_method(method, {}), network).items()
    }
    assert rows == {
        "statistics/styles": True,
        "statistics/style": False,
        "statistics/amplitudes": True,
        "update/fpl/prototypes": True,
    }


def test_a_method_that_shares_nothing_but_weights_says_so():
    network = build_network("cnn", 4, weights=None)
    with pytest.raises(ExperimentError, match="fedavg shares nothing but weights"):
        chosen_entries(build_method("fedavg", {}), network, None)
    asked = chosen_entries(build_method("fedavg", {}), network, "statistics")
    assert list(asked) == [STATISTICS]
    with pytest.raises(
        ExperimentError, match=r"ccst sends no 'style'.*it sends: statistics/styles"
    ):
        chosen_entries(build_method("ccst", {}), network, "style")


def test_long_rows_are_hashed_with_their_inner_products():
    rows = torch.randn(2, 40_000, generator=stream(0, "rows"))
    rows[1] += rows[0]
    short = hashed(rows)
    assert short.shape == (2, 16_384)
    assert short[0] @ short[1] == pytest.approx(float(rows[0] @ rows[1]), rel=0.05)
    assert torch.equal(hashed(rows[:, :100]), rows[:, :100])


@pytest.mark.parametrize("method", ["pardon", "ccst"])
def test_what_is_read_is_what_the_run_sent(place, runs, method):
    """The setup is repeated bit for bit: what clients agreed on follows from it."""
    loaded = load_finished_run(runs(method), place / "cache", lambda *_: None)
    (entry,) = entries_of(loaded.method, loaded.worker.network).values()
    sent = Senders(loaded).real(entry, range(6))
    context = loaded.state.context.tensors
    if method == "ccst":
        assert torch.equal(torch.cat(list(sent.values())), context["styles"].flatten(1))
    else:
        again = loaded.method.aggregate_statistics(
            (id, type(loaded.state.context)({"style": rows.view(2, -1)}))
            for id, rows in sent.items()
        )
        assert torch.equal(again.tensors["style"], context["style"])


def test_a_row_of_one_image_is_recognised():
    samples = torch.randn(10, 4, generator=stream(0, "samples"))
    own = samples[[7, 2]]
    assert sorted(matched(own, samples, 2, stream(0, "chance"))) == [[0, 7], [1, 2]]
    pooled = samples.mean(0, keepdim=True)
    pairs = matched(pooled, samples, 5, stream(0, "chance"))
    assert [row for row, _ in pairs] == [0] * 5
    assert len({image for _, image in pairs}) == 5


# --- the attacks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *((method, "server") for method in ("pardon", "ccst", "elcfs", "fpl", "fedbn")),
        *((method, "client") for method in ("pardon", "ccst", "fpl")),
    ],
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
    rows = attack("elcfs", "server", bank_share=0.5)
    gaps = {row.metric: row.mean for row in rows if isinstance(row, DifferenceRow)}
    assert gaps["psnr"] == pytest.approx(0, abs=1e-4)


def test_an_attack_is_a_function_of_its_seed(attack):
    assert attack("pardon", "server") == attack("pardon", "server")


def test_updates_are_inverted(attack):
    rows = attack("fedavg", "update")
    assert all(isinstance(row, InversionRow) for row in rows)
    assert [(row.batch_size, row.images, row.updates) for row in rows] == [(1, 2, 2), (2, 4, 2)]
    assert all(0 < row.cosine <= 1 for row in rows)


def test_membership_of_weights_and_styles(attack):
    rows = attack("pardon", "membership")
    assert [(row.entry, row.attack) for row in rows] == [
        (entry, kind)
        for entry in ("update/weights", "statistics/style")
        for kind in ("threshold", "shadow")
    ]
    for row in rows:
        assert isinstance(row, MembershipRow)
        assert 0 <= row.low <= row.auc <= row.high <= 1
        assert row.curve[0] == (0, 0) or row.curve[0][0] == 0
        assert row.curve[-1] == (1, 1)
        assert row.members == row.others


# --- what is kept, and what is refused ------------------------------------------------------------


def test_rows_are_kept_and_replaced_and_shown(attack, runs):
    attack("pardon", "server")
    attack("pardon", "update")
    rows = attack("pardon", "server")
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
        "For a data-protection record",
        "a stronger attack may find more",
        "Differential privacy was not used",
        "drawn by the server",
    ):
        assert words in page


def test_the_page_of_a_run_nobody_attacked_says_how(runs):
    folder = runs("elcfs", bank_share=0.2)
    page = write_report([folder], folder / "report.html").read_text("utf-8")
    assert "No attack on what was sent has been tried" in page
    assert "feddg privacy attack" in page


@pytest.mark.parametrize(
    ("method", "kind", "changes", "error", "words"),
    [
        ("fedavg", "server", {}, ExperimentError, "shares nothing but weights"),
        ("fedavg", "client", {}, ExperimentError, "shares nothing but weights"),
        ("fedavg", "server", {"public": ()}, ExperimentError, "shares nothing but weights"),
        ("pardon", "server", {"public": ()}, DataError, "--public"),
        ("pardon", "server", {"public": ("nowhere",)}, DataError, "no such folder"),
        ("pardon", "client", {"client": 9}, ExperimentError, "no client 9; the run has 0 to 5"),
        ("pardon", "thief", {}, ExperimentError, "no attack 'thief'"),
        ("pardon", "update", {"batch_sizes": (0,)}, ExperimentError, "batch sizes"),
        ("pardon", "update", {"optimizer": "lbfgs"}, ExperimentError, "own or sgd"),
        ("pardon", "server", {"extractor": "vgg"}, FeddgError, "needs its weights"),
        ("pardon", "server", {"targets": 0}, ExperimentError, "targets is 0; it must be 2 or more"),
        ("pardon", "server", {"steps": -1}, ExperimentError, "steps is -1"),
        ("pardon", "update", {"updates": 0}, ExperimentError, "updates is 0"),
    ],
)
def test_bad_input_ends_in_one_line(place, runs, quick, method, kind, changes, error, words):
    changes = {k: tuple(map(Path, v)) if k == "public" else v for k, v in changes.items()}
    with pytest.raises(error, match=words) as caught:
        attack_run(runs(method), kind, replace(quick, **changes), cache=place / "cache")
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
            runs("pardon"), "server", replace(quick, public=(folder,)), cache=place / "cache"
        )


def test_public_images_of_any_size_and_shape_will_do(place, tmp_path, runs, quick):
    for number in range(16):
        shade = (number * 15, 9, 200 - number)
        Image.new("RGB", (2 + 9 * number, 1 + number), shade).save(tmp_path / f"{number}.png")
    rows = attack_run(
        runs("pardon"), "server", replace(quick, public=(tmp_path,)), cache=place / "cache"
    )
    assert {row.public for row in rows if isinstance(row, ReconstructionRow)} == {16}


@pytest.fixture(scope="module")
def summed(place):
    """A run whose server saw only sums."""
    model = {"backbone": "cnn_gn", "weights": None, "normalization": "frozen"}
    fields = {**SMALL, "model": model, "defences": ["secure_aggregation"]}
    return trained_run(place / "runs", place / "cache", "fedavg", **fields)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("update", "sums of updates alone .secure aggregation.: there is no single update"),
        ("membership", "sums of updates alone .secure aggregation., and nothing beside them"),
        ("server", "shares nothing but weights"),
    ],
)
def test_where_the_server_saw_only_sums_there_is_nothing_single_to_attack(
    place, summed, quick, kind, words
):
    with pytest.raises(FeddgError, match=words):
        attack_run(summed, kind, quick, cache=place / "cache")


def test_no_run_no_attack(place, tmp_path, quick):
    with pytest.raises(RunError, match="holds no run"):
        attack_run(tmp_path, "update", quick, cache=place / "cache")


def test_the_command_says_what_was_found(place, runs, monkeypatch):
    monkeypatch.setenv("FEDDG_CACHE", str(place / "cache"))
    command = ["privacy", "attack", str(runs("pardon")), "--kind", "update", "--updates", "1"]
    command += ["--iterations", "2", "--batch-sizes", "1", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert (row["kind"], row["batch_size"]) == ("inversion", 1)
