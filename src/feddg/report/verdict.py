"""What a comparison comes to, in words: which method is best, and what speaks against saying so."""

from feddg.comparison.results import Results, method_findings, unsteady_best
from feddg.comparison.statistics import Margin, average_over_columns, best_other, paired_margin
from feddg.methods.base import METHODS, idea_of
from feddg.report.finding_words import alarm_words, finding_sentence, how_often
from feddg.report.many_tables import interval_text
from feddg.report.wording import counted, listed, percent, percent_sign, spelled


def best_method(results: Results) -> str | None:
    """The method with the best average; None where none has every column."""
    averages = _averages(results)
    return max(averages, key=lambda method: averages[method], default=None)


def _averages(results: Results) -> dict[str, float]:
    return {
        method: average.mean
        for method, values in results.accuracies(results.served).items()
        if (average := average_over_columns(values, results.columns)) is not None
    }


def _margin_of(results: Results, best: str) -> tuple[str, Margin] | None:
    """The best other method, and the margin over it."""
    accuracies = results.accuracies(results.served)
    other = best_other(best, accuracies)
    margin = paired_margin(accuracies[best], accuracies[other]) if other else None
    return (other, margin) if other is not None and margin is not None else None


def about_best(results: Results) -> tuple[str, str] | None:
    """What the best method does, in its own words; None where none is best, or it has none.

    Returns:
        A heading, and the words: the idea, and how sure it is that the method is the best.
    """
    best = best_method(results)
    if best is None or best.lower() not in METHODS:
        return None
    idea = idea_of(METHODS.find(best.lower()))
    told = _margin_of(results, best)
    sure = (
        ""
        if is_decided(results) or told is None
        else (
            f" It has the best average here, but these runs do not tell it from {spelled(told[0])}."
        )
    )
    return (f"What {spelled(best)} does", f"{idea}{sure}") if idea else None


def is_decided(results: Results) -> bool:
    """Whether the best method is told from the next one."""
    best = best_method(results)
    found = _margin_of(results, best) if best is not None else None
    return found is not None and found[1].decided


def verdict_words(results: Results) -> str:
    """The result in plain words."""
    question = f"{results.question} " if results.question else ""
    best = best_method(results)
    if best is None:
        return f"{question}No method has a result in every column yet."
    over = "" if len(results.columns) == 1 else f", averaged over {len(results.columns)} columns"
    text = (
        f"{question}{spelled(best)} recognised {percent_sign(_averages(results)[best])} of the "
        f"held-out test images {results.served.when}{over}{_but(results, best)}"
    )
    found = _margin_of(results, best)
    if found is None:
        return f"{text}."
    other, margin = found
    text += f", {percent(margin.mean)} points more than {spelled(other)}{_but(results, other)}"
    if margin.low is None:
        return f"{text}. No interval is claimed ({margin.why_no_interval}): nothing is decided."
    verdict = (
        "The difference is larger than chance between these runs explains."
        if margin.decided
        else "These runs do not decide which of the two is better."
    )
    return f"{text} (95 % interval {interval_text(margin)}). {verdict}"


def _but(results: Results, method: str) -> str:
    """The alarms about a method, in parentheses after its number; empty without any."""
    alarms = alarm_words(results, method)
    return f" (but {alarms})" if alarms else ""


def elsewhere_words(results: Results) -> str | None:
    """Says which complete runs the numbers are without, for their folders are gone; or None."""
    left = results.elsewhere
    if not left:
        return None
    shown = listed(left[:3]) if len(left) <= 3 else f"{', '.join(left[:3])} and more"
    return (
        f"{counted(len(left), 'complete run')} left out, known from kept results alone, without "
        f"run folders here: {shown}. `feddg report` with the file of kept results shows all of "
        "them."
    )


def warnings_about(results: Results) -> list[str]:
    """What must be known before trusting the numbers, a sentence each; the gravest first."""
    found = [one for method in results.methods for one in method_findings(results, method)]
    said = [
        f"{spelled(one.method)}: {how_often(one)}."
        for one in sorted(found, key=lambda one: -one.severity)
    ]
    best = best_method(results)
    unsteady = unsteady_best(results, best) if best is not None else None
    if unsteady is not None:
        said.append(finding_sentence(unsteady))
    if len({result.run.served.name for result in results.results}) > 1:
        said.append(
            "The runs serve different models (final round, means over rounds): the numbers are "
            "the final round's for all; the others are under “Which round counts”."
        )
    if len(results.seeds_run) == 1 and len(results.methods) > 1:
        said.append(
            f"{counted(1, 'seed')} only: how much of a difference is chance cannot be told."
        )
    return said
