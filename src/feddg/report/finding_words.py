"""Findings in words: sentences for pages and the console, short ones for tables and headlines."""

from collections.abc import Sequence

from feddg.comparison.results import MethodFinding, Results, method_findings
from feddg.report.wording import counted, percent, percent_sign, readable, spelled
from feddg.runs.findings import Finding, FindingKind, Severity, ShareInterval, Standing


def interval_words(interval: ShareInterval | None) -> str:
    """``32.6 to 41.5``, in percent; empty without an interval."""
    return f"{percent(interval.low)} to {percent(interval.high)}" if interval else ""


def headline_words(found: Sequence[Finding]) -> str:
    """What must stand before an accuracy in a headline: ``No better than a constant model: ``."""
    text = " and ".join(_alarms(found))
    return f"{text[0].upper()}{text[1:]}: " if text else ""


def remark_words(found: Sequence[Finding]) -> str:
    """What must stand behind a name: `` (no better than a constant model)``; empty without any."""
    text = "; ".join(_alarms(found))
    return f" ({text})" if text else ""


def _alarms(found: Sequence[Finding]) -> list[str]:
    return [finding.kind.value for finding in found if finding.severity is Severity.ALARM]


def beside_words(at: Standing) -> str:
    """What an accuracy must be read beside, in one sentence; empty where nothing is known."""
    parts = []
    if at.constant is not None:
        parts.append(f"always naming the largest class reaches {percent_sign(at.constant)}")
    if at.balanced is not None:
        chance = f" (guessing: {percent_sign(at.chance)})" if at.chance is not None else ""
        parts.append(f"balanced accuracy is {percent_sign(at.balanced)}{chance}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def finding_sentence(finding: Finding, classes: Sequence[str] = ()) -> str:
    """A finding as a sentence of its own.

    Args:
        finding: it.
        classes: names of the classes, where they are known.
    """
    figure, beside = percent_sign(finding.figure), percent_sign(finding.beside)
    if finding.kind is FindingKind.CONSTANT:
        return (
            f"No better than a constant model: always naming the largest class reaches {figure} "
            f"of the images, the model {beside}. The difference, or that between its balanced "
            "accuracy and guessing, is no more than chance explains."
        )
    if finding.kind is FindingKind.ONE_CLASS:
        name = _class_name(finding.class_id, classes)
        return f"{figure} of the predictions are {name}, which is {beside} of the images."
    if finding.kind is FindingKind.BELOW_START:
        return (
            f"Below its own round 0: before any training the model reached {figure}, now {beside}."
        )
    if finding.kind is FindingKind.RISING:
        rounds = counted(int(finding.beside), "round")
        return (
            f"Still rising: accuracy rose by {percent(finding.figure)} points over the last "
            f"{rounds}. The run was stopped before it had learned what it could."
        )
    return (
        "From one evaluation to the next, accuracy strays from its trend by "
        f"{percent(finding.figure)} points on average, more than the {percent(finding.beside)} "
        "points between the methods: which "
        "round is looked at decides which is better."
    )


def _class_name(class_id: int | None, classes: Sequence[str]) -> str:
    if class_id is None or class_id >= len(classes):
        return "one class"
    return f"“{readable(classes[class_id])}”"


def how_often(found: MethodFinding) -> str:
    """A finding about a method: ``no better than a constant model in 2 of 6 runs``."""
    if found.total == 1:
        return found.kind.value
    runs = "all" if found.runs == found.total else str(found.runs)
    return f"{found.kind.value} in {runs} of {found.total} runs"


def alarm_words(results: Results, method: str) -> str:
    """The alarms about a method, for parentheses after its name; empty without any."""
    found = method_findings(results, method)
    return "; ".join(how_often(one) for one in found if one.severity is Severity.ALARM)


def marked(results: Results, method: str) -> str:
    """A method's name for a table, with what must not be missed beside its numbers."""
    alarms = alarm_words(results, method)
    return f"{spelled(method)} ({alarms})" if alarms else spelled(method)
