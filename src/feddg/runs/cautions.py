"""What is said wherever a run's model is used: how good it is, and if its labels mean nothing."""

from collections.abc import Iterator
from pathlib import Path

from feddg.errors import RunError
from feddg.records import TEST, VAL
from feddg.runs.evaluations import Evaluations
from feddg.runs.findings import Finding, FindingKind, Severity, findings, standing
from feddg.runs.reading import read_run
from feddg.runs.selection_rules import find_rule


def cautions(run: Path | str, which: str, round_: int) -> tuple[str, ...]:
    """Returns what must be said of a model before anybody uses it, one sentence each.

    Empty where nothing speaks against it, or where nothing was measured.

    Args:
        run: the run folder.
        which: the model's selection rule, as ``load_model`` takes it.
        round_: the round it is from.

    Raises:
        RunError: the folder holds no run.
    """
    weights = find_rule(which).weights
    evaluations, split = _held_out(run, weights, round_)
    found = findings(evaluations, round_, split, weights)
    alarms = (_sentence(one) for one in found if one.severity is Severity.ALARM)
    return (*_unfinished(Path(run)), *alarms)


def _unfinished(run: Path) -> Iterator[str]:
    record = read_run(run)
    if record.status != "completed":
        yield (
            f"The run has not finished (round {record.rounds_done} of {record.rounds_planned}; "
            f"`feddg resume {run}` goes on): this is not the model that it will serve."
        )


def result_sentence_of(run: Path | str, which: str, round_: int) -> str:
    """Returns how good a model was on held-out domains, with its interval; see :func:`cautions`.

    Raises:
        RunError: the folder holds no run.
    """
    weights = find_rule(which).weights
    evaluations, split = _held_out(run, weights, round_)
    evaluations = evaluations.of(weights)
    found = standing(evaluations, round_, split)
    if found is None:
        return "It was measured on no domain that was held out of its training."
    rows = evaluations.at(round_, split)
    share, domains = found.accuracy, ", ".join(row.domain for row in rows)
    return (
        f"It was right for {share.share:.1%} (95 %: {share.low:.1%} to {share.high:.1%}) of "
        f"{sum(row.examples for row in rows)} images of a domain nobody trained on ({domains})."
    )


def _held_out(run: Path | str, weights: str, round_: int) -> tuple[Evaluations, str]:
    evaluations = read_run(Path(run)).evaluations
    own = evaluations.of(weights)
    split = next((split for split in (TEST, VAL) if own.at(round_, split)), TEST)
    return evaluations, split


def refuse_doubtful(said: tuple[str, ...]) -> None:
    """Ends with an error where something must be said of a model.

    Raises:
        RunError: there is a caution.
    """
    if said:
        raise RunError(f"{said[0]} Train longer, or without --strict if it is only a trial.")


def _sentence(finding: Finding) -> str:
    figure, own = f"{finding.figure:.1%}", f"{finding.beside:.1%}"
    if finding.kind is FindingKind.CONSTANT:
        return (
            "This model is no better than a constant one: on the held-out images always naming "
            f"the largest class is right for {figure}, this model for {own}, and chance explains "
            "the difference, in images or in classes. Its labels mean nothing."
        )
    return (
        f"This model is worse than before its training: then it was right for {figure} of the "
        f"held-out images, now for {own}. Its labels mean nothing."
    )
