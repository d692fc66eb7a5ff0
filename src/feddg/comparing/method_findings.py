"""What must be said beside a method's accuracy in a comparison, gathered from its runs."""

import math
from collections import Counter
from dataclasses import dataclass

from feddg.comparing.intervals import best_other, paired_margin
from feddg.comparing.results import Results
from feddg.runs.findings import Finding, FindingKind, Severity, findings, movement, unsteady


@dataclass(frozen=True, slots=True)
class MethodFinding:
    """A kind of finding, and in how many of a method's runs it was made.

    Attributes:
        method: the method's label.
        kind: what was found.
        severity: how much it takes from the method's numbers.
        runs: in how many runs.
        total: of how many.
    """

    method: str
    kind: FindingKind
    severity: Severity
    runs: int
    total: int


def method_findings(results: Results, method: str) -> list[MethodFinding]:
    """Returns what was found in the models that a method's runs serve, the gravest first."""
    runs = list({result.run.folder: result for result in results.of(method)}.values())
    found = [
        finding
        for result in runs
        for finding in findings(
            result.run.evaluations,
            result.rounds[results.served.name],
            weights=results.served.weights,
        )
    ]
    counts = Counter((finding.kind, finding.severity) for finding in found)
    gathered = [
        MethodFinding(method, kind, severity, count, len(runs))
        for (kind, severity), count in counts.items()
    ]
    return sorted(gathered, key=lambda one: (-one.severity, -one.runs))


def unsteady_best(results: Results, best: str) -> Finding | None:
    """Returns whether rounds move more than the best method is above the next one."""
    accuracies = results.accuracies(results.served)
    other = best_other(best, accuracies)
    margin = paired_margin(accuracies[best], accuracies[other]) if other else None
    if other is None or margin is None:
        return None
    known = [
        moved
        for method in (best, other)
        for result in results.of(method)
        if (moved := movement(result.run.evaluations)) is not None
    ]
    return unsteady(math.fsum(known) / len(known) if known else None, margin.mean)
