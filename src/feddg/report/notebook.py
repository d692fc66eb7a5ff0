"""HTML without scripts that a notebook shows for runs, comparisons and predictions."""

from functools import singledispatch
from pathlib import Path
from typing import Any

from feddg.comparison.compare import Comparison
from feddg.prediction.predict import PredictedImages, Prediction
from feddg.report.blocks import picture_of, template_named
from feddg.report.run_page import final_table, result_sentence, tested_on
from feddg.report.tables import about_results, lead_of, main_tables
from feddg.report.text import spelled
from feddg.runs.diagnostics import about_run
from feddg.runs.reading import Run
from feddg.text import counted, percent_sign, readable, shortened

MOST_SHOWN = 12
THUMBNAIL = 96
"""Side of a thumbnail in pixels."""


@singledispatch
def html_of(thing: Any) -> str:
    """Returns the HTML of an object for a notebook.

    Args:
        thing: a run, a comparison or predictions.

    Raises:
        TypeError: it is another type.
        RunError: its folder is damaged or missing.
    """
    raise TypeError(f"a {type(thing).__name__} cannot be shown in a notebook")


def text_of(thing: Any) -> str:
    """Returns an object as a few lines of text that end in a sentence; see :func:`html_of`."""
    if not isinstance(thing, Run | Comparison):
        return f"{type(thing).__name__}: computed one at a time as you loop over them."
    (title, lead), about = _words(thing), f"folder: {thing.folder}"
    if isinstance(thing, Comparison):
        failed = f", {len(thing.failures)} failed" if thing.failures else ""
        about = f"{counted(len(thing.folders), 'run')}{failed}; {about}"
    return f"{title}\n{about}\n{lead}"


def _words(thing: Run | Comparison) -> tuple[str, str]:
    """Returns the title, and the result in words."""
    if isinstance(thing, Comparison):
        return thing.results.title, lead_of(thing.results)
    lead = result_sentence(thing) if thing.table else "Nothing has been measured yet."
    return f"{spelled(thing.method)}{tested_on(thing)}", lead


@html_of.register
def _run(run: Run) -> str:
    evaluated, (title, lead) = bool(run.table), _words(run)
    return _page(
        title=title,
        lead=lead,
        notices=[str(diagnostic) for diagnostic in about_run(run)] if evaluated else [],
        tables=[final_table(run)] if evaluated else [],
        report=run.folder / "report.html",
    )


@html_of.register
def _comparison(comparison: Comparison) -> str:
    title, lead = _words(comparison)
    failed = [f"{run.cell.folder.name}: {run.error or run.status}" for run in comparison.failures]
    return _page(
        title=title,
        lead=lead,
        notices=[*failed, *map(str, about_results(comparison.results))],
        tables=main_tables(comparison.results),
        report=comparison.report,
    )


@html_of.register
def _predictions(predictions: PredictedImages) -> str:
    shown = predictions.ahead(MOST_SHOWN)
    more = len(predictions.ahead(MOST_SHOWN + 1)) > MOST_SHOWN
    return _page(
        title="Predictions",
        lead="A preview of the next images; your loop will still receive them."
        if shown
        else "There are no more.",
        pictures=[(picture_of(one.file, THUMBNAIL), *_answer(one)) for one in shown],
        more=more,
    )


def _page(*, report: Path | None = None, **parts: Any) -> str:
    """Fills the template with the given parts; missing parts are left out."""
    return template_named("notebook.html.j2").render(
        **parts,
        report=str(report) if report is not None and report.is_file() else None,
    )


def _answer(prediction: Prediction) -> tuple[str, str]:
    name = shortened(readable(Path(prediction.file).name))
    if prediction.label is None:
        return name, f"unusable: {prediction.reason}"
    light = ", unlike anything seen in training" if prediction.unlike_training else ""
    return name, f"{readable(prediction.label)}, {percent_sign(prediction.confidence)}{light}"
