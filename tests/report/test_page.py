"""The page is read with an HTML parser; its figures are compared to the records' own formulas."""

import html
import itertools
import json
import re
import shlex
import shutil
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from typer.main import get_command

from feddg.api import resume, run
from feddg.cli import app
from feddg.errors import RunError
from feddg.experiment import load_stored
from feddg.report.blocks import Code, Fold, Page, Prose
from feddg.report.page import (
    ensure_report,
    page_about,
    tables_of,
    write_between_marks,
    write_report,
    write_tables,
)
from feddg.report.run_page import cost_of, run_steps
from feddg.runs.observer import Observer
from feddg.runs.reading import read_run
from feddg.text import size
from odd_inputs import MARKUP
from run_folders import ConstantMaker, RisingMaker
from trained_runs import SHORT


class PageReader(HTMLParser):
    """Collects what a page consists of: tags, addresses, charts, table rows and visible text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags = Counter()
        self.addresses = []
        self.handlers = []
        self.json = []
        self.rows = []
        self.text = []
        self._open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        fields = dict(attrs)
        self.addresses += [fields[key] for key in ("src", "href", "action") if key in fields]
        self.handlers += [key for key in fields if key.startswith("on")]
        self._open.append((tag, fields))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        tag, fields = self._open[-1] if self._open else ("", {})
        if tag == "script":
            if fields.get("type") == "application/json":
                self.json.append(json.loads(data))
            return
        if tag == "style":
            return
        self.text.append(data)
        if any(name in ("td", "th") for name, _ in self._open):
            self.rows[-1][-1] += data.strip()

    @property
    def charts(self):
        return [content for content in self.json if "data" in content and "layout" in content]

    def lines(self):
        """Traces of all charts by name."""
        return {
            trace["name"]: trace
            for chart in self.charts
            for trace in chart["data"]
            if "name" in trace
        }

    def row(self, *beginning):
        found = [row for row in self.rows if row[: len(beginning)] == list(beginning)]
        assert found, (beginning, self.rows)
        return found[0]


@pytest.fixture
def read_page(tmp_path):
    def read(*folders):
        return PageReader(
            write_report(folders, tmp_path / "out" / "report.html").read_text("utf-8")
        )

    return read


# --- one run ------------------------------------------------------------------------------------


def test_the_curves_are_the_recorded_accuracies(folder_maker, read_page):
    maker = folder_maker()
    lines = read_page(maker.write()).lines()
    for name, split, domain in (
        ("photo · held-out test", "test", 0),
        ("art painting · held-out validation", "val", 0),
        ("sketch · in-domain validation", "id_val", 1),
        ("cartoon · in-domain test", "id_test", 0),
    ):
        expected = [100 * maker.accuracy(split, domain, round_) for round_ in range(7)]
        assert lines[name]["x"] == list(range(7))
        assert lines[name]["y"] == pytest.approx(expected)


def test_the_loss_curves_are_the_recorded_terms(folder_maker, read_page):
    maker = folder_maker()
    lines = read_page(maker.write()).lines()
    expected = [maker.round_row(round_).terms["triplet"] for round_ in range(1, 7)]
    assert lines["triplet"]["y"] == pytest.approx(expected, abs=1e-6)
    assert lines["triplet"]["x"] == [1, 2, 3, 4, 5, 6]


def test_the_final_table_shows_the_rules_by_name(folder_maker, read_page):
    maker = folder_maker()
    page = read_page(maker.write())
    in_domain = [np.mean([maker.accuracy("id_val", d, r) for d in (0, 1)]) for r in range(1, 7)]
    held_out = [maker.accuracy("val", 0, r) for r in range(1, 7)]
    others = {
        "Mean of the last rounds": (6, "swa"),
        "Exponential mean": (6, "ema"),
        "Best in-domain validation": (1 + int(np.argmax(in_domain)), "last"),
        "Best held-out validation": (1 + int(np.argmax(held_out)), "last"),
    }
    heading = page.row("Domain", "Images")
    assert heading[6:] == [f"{rule}round {r}" for rule, (r, _) in others.items()]
    row = page.row("photo")
    assert row[:3] == ["photo", "400", f"{100 * maker.accuracy('test', 0, 6):.1f}"]
    assert row[6:] == [
        f"{100 * maker.accuracy('test', 0, r, weights):.1f}" for r, weights in others.values()
    ]
    low, high = _wilson(maker.accuracy("test", 0, 6), 400)
    counts = np.array(maker.confusion())
    support = counts.sum(axis=1)
    assert heading[2:6] == [
        "Final roundthis page's model, round 6",
        "95 % interval",
        "Balanced",
        "Largest classof the images",
    ]
    assert row[3:6] == [
        f"{100 * low:.1f} to {100 * high:.1f}",
        f"{100 * np.mean(counts.diagonal() / support):.1f}",
        f"{100 * support.max() / support.sum():.1f}",
    ]
    assert page.row("mean of domains (2)")[1:3] == ["801", f"{100 * in_domain[-1]:.1f}"]


def _wilson(share, examples):
    """The interval as the solution of (p - share)^2 = z^2 p (1 - p) / n, found by its roots."""
    square = 1.959964**2 / examples
    return sorted(np.roots([1 + square, -(2 * share + square), share**2]))


def test_the_confusion_matrix_is_in_percent_of_its_rows(folder_maker, read_page):
    maker = folder_maker()
    counts = np.array(maker.confusion())
    heat = next(c for c in read_page(maker.write()).charts if "recognised as" in str(c["layout"]))
    (trace,) = heat["data"]
    expected = [[100 * cell / sum(row) for cell in row] for row in counts.tolist()]
    np.testing.assert_allclose(trace["z"], expected, atol=0.051)
    assert trace["customdata"] == counts.tolist()
    assert heat["layout"]["yaxis"]["ticktext"] == maker.classes


def test_the_busiest_site_is_named_with_what_it_sent(folder_maker, read_page):
    maker = folder_maker()
    page = read_page(maker.write())
    sent = Counter()
    for row in maker.messages():
        if row.direction == "up":
            sent[row.client] += row.bytes
    assert f"at most {size(max(sent.values()))} from one site" in "".join(page.text)


def test_headline_pictures_and_environment_are_there(folder_maker, read_page):
    page = read_page(folder_maker().write())
    text = "".join(page.text)
    assert "PARDON on pacs, tested on photo" in text
    assert "completed, 6 rounds" in text
    assert "Style picture 0: before and after." in text
    assert page.tags["img"] == 1
    assert page.row("torch") == ["torch", "2.15.0"]
    assert "backbone: resnet18" in text
    assert "1 update refused by the server" in text
    assert "1 image could not be used" in text


def test_the_groups_of_clients_are_counted_and_named(folder_maker, read_page):
    page = read_page(folder_maker(clients=19).write())
    assert "Groups of clients before training" in "".join(page.text)
    even = [f"client-{id}" for id in range(0, 19, 2)]
    odd = [f"client-{id}" for id in range(1, 19, 2)]
    first = page.row("Group 1")
    assert first[1] == "10"
    assert first[2] == "client-0 and 9 more" + "".join(even)
    assert page.row("Group 2")[1:] == ["9", "client-1 and 8 more" + "".join(odd)]


def test_a_model_that_learned_nothing_is_not_headlined_as_a_success(tmp_path, read_page):
    page = read_page(ConstantMaker(tmp_path / "nothing").write())
    text = " ".join("".join(page.text).split())
    lead = text[text.index("No better than majority class: after 6 rounds") :]
    assert "recognised 60.0 %" in lead
    assert "(95 % interval 55.1 to 64.7)" in lead
    assert "balanced accuracy is 33.3 % (guessing: 33.3 %)" in lead
    assert "Commonest prediction" in text
    assert "feddg run" in text
    assert "--lr 0.001" in text


def test_a_constant_model_beside_another_is_marked(tmp_path, folder_maker, read_page):
    nothing = ConstantMaker(tmp_path / "nothing", method="fedavg").write()
    other = folder_maker("other", gain=-0.1).write()
    text = "".join(read_page(nothing, other).text)
    assert "(but no better than majority class)" in text
    assert "FedAvg (no better than majority class)" in text


def test_a_rising_run_is_told_to_train_longer(tmp_path, folder_maker, read_page):
    text = "".join(read_page(RisingMaker(tmp_path / "rising").write()).text)
    assert "still rising when the run stopped: by 21.0 points over the last 3 rounds" in text
    assert "--rounds 12" in text
    assert "still rising" not in "".join(read_page(ConstantMaker(tmp_path / "flat").write()).text)


def test_commands_of_what_to_do_next_are_ones_the_console_takes(tmp_path, folder_maker):
    makers = [
        ConstantMaker(tmp_path / "nothing"),
        RisingMaker(tmp_path / "rising"),
        folder_maker("good"),
        folder_maker("stopped", rounds=2, status="interrupted"),
    ]
    commands = [
        block.text
        for maker in makers
        for block in run_steps(read_run(maker.write())).blocks
        if isinstance(block, Code)
    ]
    assert {shlex.split(command)[1] for command in commands} == {
        "run",
        "evaluate",
        "resume",
    }
    console = get_command(app)
    for command in commands:
        _, name, *rest = shlex.split(command)
        console.commands[name].make_context(name, rest)  # raises where it takes no such option


def test_classes_stand_with_their_images_recall_and_precision(folder_maker, read_page):
    maker = folder_maker()
    counts = np.array(maker.confusion())
    row = read_page(maker.write()).row("elephant", str(counts[1].sum()))
    assert row[2:5] == [
        f"{100 * counts[1, 1] / counts[1].sum():.1f}",
        f"{100 * counts[1, 1] / counts[:, 1].sum():.1f}",
        str(counts[:, 1].sum()),
    ]


def test_who_holds_what_has_two_maps_and_a_number_for_each_skew(folder_maker, read_page):
    page = read_page(folder_maker("plain").write())
    heat = [chart["layout"] for chart in page.charts if chart["data"][0]["type"] == "heatmap"]
    assert sum("clients" in json.dumps(layout["xaxis"]["title"]) for layout in heat) == 2
    told = [text.strip() for text in page.text if " skew: " in text]
    assert [line.split(":")[0] for line in told] == [
        "Feature skew",
        "Label skew",
        "Quantity skew",
    ]


# --- unfinished and broken ----------------------------------------------------------------------


def test_an_unfinished_run_says_so(folder_maker, read_page):
    folder = folder_maker(rounds=3, status=None).write()
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"kind":"round","rou')
    text = "".join(read_page(folder).text)
    assert "unfinished, 3 of 6 rounds" in text
    assert "The run has not ended: it is still running, or it was cut off" in text


def test_a_failed_run_says_why(folder_maker, read_page):
    text = "".join(read_page(folder_maker(rounds=2, status="failed").write()).text)
    assert "The run failed: Loss is not a number." in text


def test_a_run_that_has_only_begun_has_a_page(folder_maker, read_page, tmp_path):
    full = folder_maker("full").write()
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(full / "experiment.yaml", begun)
    page = read_page(begun)
    assert "has not been evaluated yet" in "".join(page.text)
    assert page.charts == []
    read_page(full, begun)


def test_a_picture_that_cannot_be_read_is_mentioned(folder_maker, read_page):
    folder = folder_maker().write()
    (folder / "figures" / "styles-0.png").write_bytes(b"not a picture")
    page = read_page(folder)
    assert page.tags["img"] == 0
    assert "The picture styles-0.png could not be read." in "".join(page.text)


def test_cost_before_there_is_a_summary_comes_from_the_rounds(folder_maker):
    cost = cost_of(read_run(folder_maker(rounds=2, status=None).write()))
    assert cost.seconds == pytest.approx(
        {"setup": 2.5, "train": 8, "aggregate": 0.2, "evaluate": 1, "total": 11.7}
    )
    assert cost.images_per_second == pytest.approx(65.0)


def test_nothing_to_report_and_nowhere_to_write_are_clear_errors(folder_maker, tmp_path):
    with pytest.raises(RunError, match="no run to report on"):
        write_report([], tmp_path / "report.html")
    folder = folder_maker().write()
    with pytest.raises(RunError, match="Cannot write the report"):
        write_report([folder], tmp_path)
    assert not list(tmp_path.parent.glob("*.unfinished"))


# --- safety and self-containment ----------------------------------------------------------------


def test_names_are_text_whatever_they_contain(folder_maker, read_page):
    benign = folder_maker("benign", method="theirs", classes=["a", "b"], status="failed")
    nasty = folder_maker("nasty", classes=[MARKUP, "b"], status="failed")
    nasty.method, nasty.test, nasty.training = MARKUP, [MARKUP], [MARKUP + "1", "sketch"]
    nasty_folder = nasty.write()
    summary = json.loads((nasty_folder / "summary.json").read_text())
    (nasty_folder / "summary.json").write_text(json.dumps(summary | {"error": MARKUP}))
    (nasty_folder / "figures" / "captions.json").write_text(json.dumps({"styles-0.png": MARKUP}))
    clients = json.loads((nasty_folder / "clients.json").read_text())
    clients["clients"][0]["name"] = clients["bad_images"][0]["path"] = MARKUP
    (nasty_folder / "clients.json").write_text(json.dumps(clients))
    expected, page = read_page(benign.write()), read_page(nasty_folder)
    assert page.tags == expected.tags
    assert page.handlers == []
    assert MARKUP in "".join(page.text)
    for label in _chart_texts(page.charts):
        assert "<script" not in label
        assert "<img" not in label


def _chart_texts(content):
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, list):
        return [text for item in content for text in _chart_texts(item)]
    return [content] if isinstance(content, str) else []


def test_names_that_look_like_numbers_or_are_cut_alike_stay_apart(folder_maker, read_page):
    classes = ["0", "1", "x" * 30 + "a", "x" * 30 + "b"]
    page = read_page(folder_maker(classes=classes).write())
    heat = next(c for c in page.charts if "recognised as" in str(c["layout"]))
    assert heat["layout"]["xaxis"]["tickvals"] == [0, 1, 2, 3]
    assert heat["layout"]["xaxis"]["ticktext"][:2] == ["0", "1"]


def test_the_page_asks_for_nothing_from_outside(folder_maker, read_page):
    page = read_page(folder_maker("a").write(), folder_maker("b", method="fedavg").write())
    assert page.addresses
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert page.tags["link"] == 1  # the empty icon, which keeps browsers from looking for one


def test_the_page_is_small_and_always_the_same(folder_maker, tmp_path):
    folder = folder_maker().write()
    first = write_report([folder], tmp_path / "1.html").read_bytes()
    assert first == write_report([folder], tmp_path / "2.html").read_bytes()
    assert len(first) < 2_500_000


# --- several runs -------------------------------------------------------------------------------


def test_a_comparison_puts_runs_side_by_side(folder_maker, read_page):
    better = folder_maker("b", gain=0.1)
    worse = folder_maker("a", method="fedavg")
    page = read_page(worse.write(), better.write())
    scores = [100 * maker.accuracy("test", 0, 6) for maker in (worse, better)]
    assert page.row("FedAvg")[1] == f"{scores[0]:.1f}"
    assert page.row("PARDON")[1] == f"{scores[1]:.1f}"
    text = "".join(page.text)
    assert "FedAvg and PARDON on pacs, tested on photo" in text
    (margin,) = re.findall(r"([\d.]+) points more than FedAvg", text)
    assert float(margin) == pytest.approx(scores[1] - scores[0], abs=0.051)
    lines = page.charts[0]["data"]
    assert [line["name"] for line in lines] == ["FedAvg", "PARDON"]
    assert lines[1]["y"] == pytest.approx([100 * better.accuracy("test", 0, r) for r in range(7)])
    assert page.row("method.name") == ["method.name", "fedavg", "pardon"]


def test_runs_with_different_test_domains_are_not_ranked(folder_maker, read_page):
    other = folder_maker("b", test=["sketch"], training=["cartoon"])
    page = read_page(folder_maker("a").write(), other.write())
    text = "".join(page.text)
    assert page.row("Method")[1:3] == ["photo", "sketch"]
    assert "points more than" not in text


# --- many clients, domains and classes ----------------------------------------------------------


def test_long_lists_of_domains_are_cut(folder_maker, read_page):
    many = [f"camera{index}" for index in range(15)]
    page = read_page(folder_maker(test=many, rounds=1).write())
    assert "held-out test, mean of 15 domains" in page.lines()
    assert any(row[0].startswith("lowest: camera") for row in page.rows if row)
    assert page.row("camera7")  # in the unfolded table


# --- on a phone ----------------------------------------------------------------------------------


def test_details_are_folded_and_tables_scroll_inside_themselves(folder_maker, read_page, tmp_path):
    folders = [folder_maker("a").write(), folder_maker("b", method="fedavg").write()]
    for chosen, always in ((folders[:1], "Mistakes by class"), (folders, "Margins")):
        page = write_report(chosen, tmp_path / "report.html").read_text("utf-8")
        main = page[page.index("<main>") : page.index("</main>")]
        folded = set(re.findall(r"<details>\s*<summary><h2>([^<]+)", main))
        assert {"Cost", "Metrics", "Words"} <= folded
        assert not {"Accuracy", always, "What to do next"} & folded
        assert main.count("<table>") == len(
            re.findall(r'<div class="scroll"[^>]*>\s*<table>', main)
        )
        assert ".scroll {\n  overflow-x: auto;" in page
        assert "data-label" not in page  # rows are not unrolled into cards


def test_items_of_the_header_wrap_without_separators(folder_maker, tmp_path):
    page = write_report([folder_maker().write()], tmp_path / "report.html").read_text("utf-8")
    header = page[page.index('<p class="tags">') : page.index("<h1>")]
    assert re.fullmatch(r'<p class="tags">(<span>[^<·]+</span>)+</p>\s*', header)
    assert not re.search(r"\.tags[^{]*::(before|after)", page)


# --- in a browser -------------------------------------------------------------------------------


def test_a_browser_draws_every_chart_without_error_or_request(
    open_in_browser, folder_maker, tmp_path
):
    nasty = folder_maker("nasty", classes=[MARKUP, "1", "2"], test=[MARKUP])
    out = write_report([nasty.write()], tmp_path / "report.html")
    unfold(out)
    opened = open_in_browser(out)
    assert opened.errors == []
    assert opened.requests == []
    assert 'data-charts="drawn"' in opened.page
    charts = PageReader(out.read_text("utf-8")).charts
    assert opened.page.count('data-state="drawn"') == len(charts)
    assert html.escape(MARKUP[:20], quote=False) in opened.page
    assert "example.org" not in opened.log


def unfold(page):
    """Opens everything that is folded: charts are drawn when they are seen."""
    page.write_text(page.read_text("utf-8").replace("<details", "<details open"), "utf-8")


MEASURE = """<script>addEventListener("load", () => {
  const scrolls = (part) => { for (; part; part = part.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(part).overflowX)) return true; };
  const beyond = [...document.querySelectorAll("main *, header *")].filter((part) =>
    part.getBoundingClientRect().right > innerWidth + 1 && !scrolls(part));
  const wide = document.documentElement.scrollWidth > innerWidth ? ["page"] : [];
  const named = beyond.map((part) => part.tagName + "." + (part.getAttribute("class") || ""));
  const long = document.documentElement.scrollHeight > 7000 ? ["long"] : [];
  const page = location.pathname.split("/").pop();
  parent.postMessage([page, innerWidth, ...wide, ...long, ...named].join(" "), "*");
});</script>"""
FRAMES = """<!DOCTYPE html><html><body>{}<script>
onmessage = (sent) => document.body.dataset.found =
  (document.body.dataset.found || "") + sent.data + ";";
</script></body></html>"""
FRAME = '<iframe src="{}" style="position:absolute;left:0;top:0;width:{}px;height:900px"></iframe>'


def test_nothing_is_cut_off_at_the_right(open_in_browser, folder_maker, tmp_path):
    long = folder_maker("long", classes=["a rather long name", "1", "2"], test=["a long domain"])
    folders = [long.write(), folder_maker("other").write()]
    for name, shown in (("both.html", folders), ("one.html", folders[:1])):
        page = write_report(shown, tmp_path / name)
        text = page.read_text("utf-8").replace("</body>", MEASURE + "</body>")
        page.write_text(text, "utf-8")
    frames = tmp_path / "frames.html"  # a window of its own is never narrower than 500 pixels
    places = list(itertools.product(("both.html", "one.html"), (390, 1200)))
    frames.write_text(FRAMES.format("".join(FRAME.format(*place) for place in places)))
    found = re.search('data-found="([^"]*)"', open_in_browser(frames).page)
    assert found is not None
    assert sorted(found[1].split(";")) == ["", *sorted(f"{page} {w}" for page, w in places)]


LAST_LABEL = """<script>
const seen = setInterval(() => {
  if (document.documentElement.dataset.charts !== "drawn") return;
  clearInterval(seen);
  const chart = [...document.querySelectorAll(".canvas")].find((one) =>
    one.textContent.includes("recognised as"));
  const labels = [...chart.querySelectorAll(".xtick text")];
  const edges = labels.map((one) => one.getBoundingClientRect());
  const box = chart.getBoundingClientRect();
  const inside = edges.every((edge) => edge.width && edge.left >= box.left
    && edge.right <= box.right + 1
    && edge.bottom <= box.bottom + 1);
  parent.postMessage(`${labels.length} ${inside}`, "*");
}, 100);</script>"""


def test_the_matrix_has_its_last_label_on_a_phone(open_in_browser, folder_maker, tmp_path):
    classes = ["dog", "elephant", "giraffe", "guitar", "horse", "house", "person"]
    page = write_report([folder_maker(classes=classes).write()], tmp_path / "one.html")
    text = page.read_text("utf-8").replace("</body>", LAST_LABEL + "</body>")
    (tmp_path / "measured.html").write_text(text, "utf-8")
    frame = tmp_path / "frame.html"
    frame.write_text(FRAMES.format(FRAME.format("measured.html", 390)))
    found = re.search('data-found="([^"]*)"', open_in_browser(frame).page)
    assert found is not None
    assert found[1] == f"{len(classes)} true;"


def test_a_title_is_shown_as_it_is_in_a_file_of_tables(tmp_path):
    write_tables(Page("<b>a|*x*\n# y", "Lead.", (), (), ()), tmp_path)
    (file,) = tmp_path.iterdir()
    assert file.read_text("utf-8").startswith("# \\<b\\>a\\|\\*x\\* # y\n\n")


def test_the_page_of_an_unfinished_run_does_not_stay(train_once, tmp_path):
    """Nor has an unfinished run a card, which would stay with its numbers."""

    class Stop(Observer):
        def round(self, row):
            if row.round == 1:
                raise KeyboardInterrupt

    chosen = load_stored(train_once(**SHORT) / "experiment.yaml")
    chosen = chosen.model_copy(update={"train": chosen.train.model_copy(update={"rounds": 2})})
    with pytest.raises(KeyboardInterrupt):
        run(chosen, tmp_path, observer=Stop(), report=False)
    (folder,) = tmp_path.glob("fedavg*")
    ensure_report(folder)
    assert "interrupted" in (folder / "report.html").read_text("utf-8")
    assert not (folder / "model_card.md").exists()
    resume(folder)
    assert "interrupted" not in (folder / "report.html").read_text("utf-8")
    assert (folder / "model_card.md").exists()


def test_the_notes_of_a_page_are_in_its_markdown(finished):
    page = page_about([finished])
    further = Fold("2 further notes", [Prose("Mind the_gap."), Prose("And <this>.")])
    page = replace(page, lead="All *fine*.", opening=[Prose("A notice.", notice=True), further])
    text = tables_of(page)
    notes = "All \\*fine\\*.\n\nA notice.\n\nMind the\\_gap.\n\nAnd \\<this\\>.\n\n## "
    assert text.startswith(notes)


def test_a_run_of_a_package_that_is_not_here_has_a_page_without_a_card(tmp_path):
    folder = RisingMaker(tmp_path / "run", method="of_another_package").write()
    assert "of_another_package" in ensure_report(folder).read_text("utf-8")
    assert not (folder / "model_card.md").exists()


def test_a_file_that_cannot_be_written_is_not_said_to_be_there(finished, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError) as caught:
        write_between_marks(tmp_path / "file" / "new.md", page_about([finished]))
    assert "already" not in str(caught.value)
