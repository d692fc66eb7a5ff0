"""What to do next: commands that fit what was found."""

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from feddg.comparison.results import Results, method_findings
from feddg.records import TEST, VAL
from feddg.report.blocks import Block, Code, Prose, Section
from feddg.report.headline import found_in
from feddg.report.wording import number
from feddg.runs.findings import FindingKind
from feddg.runs.reading import EXPERIMENT_FILE, RunRecord

LEARNED_NOTHING = {FindingKind.CONSTANT, FindingKind.ONE_CLASS, FindingKind.BELOW_START}
REPEATS = 3
Step = tuple[str, str]
"""Why, and the command."""


def run_steps(run: RunRecord) -> list[Section]:
    """What to do after a run; nothing for one that was not even planned."""
    steps = list(_run_steps(run)) if run.experiment.get("data") else []
    return [_section(steps)] if steps else []


def comparison_steps(results: Results, decided: bool) -> list[Section]:
    """What to do after a comparison; nothing for folders that no plan holds together.

    Args:
        results: the comparison.
        decided: whether the best method is told from the next one.
    """
    steps = list(_comparison_steps(results, decided))
    return [_section(steps)] if steps else []


def _section(steps: Sequence[Step]) -> Section:
    blocks: list[Block] = [block for why, command in steps for block in (Prose(why), Code(command))]
    return Section("What to do next", blocks)


def _run_steps(run: RunRecord) -> Iterator[Step]:
    folder, file = str(run.folder), str(run.folder / EXPERIMENT_FILE)
    if run.status != "completed":
        yield "Go on from the last completed round:", _command("resume", folder)
    kinds = {finding.kind for finding in found_in(run)}
    if kinds & LEARNED_NOTHING:
        yield from _after_nothing(run, file)
    if FindingKind.RISING in kinds and run.rounds_planned:
        rounds = str(2 * run.rounds_planned)
        yield "Accuracy still rose: train twice as long:", _command("run", file, "--rounds", rounds)
    if run.status == "completed" and not kinds & LEARNED_NOTHING:
        yield (
            "One run cannot tell a difference from chance. Repeat it with other seeds beside the "
            "plain average of clients:",
            _command("compare", "--methods", _methods(run), *_data_flags(run), "--seeds", "3"),
        )
        yield (
            "See what adapting to the unseen domain at test time changes:",
            _command("evaluate", folder),
        )


def _after_nothing(run: RunRecord, file: str) -> Iterator[Step]:
    data = run.experiment.get("data") or {}
    if data.get("source") == "folder" and data.get("root"):
        yield (
            "Look at the images first: labels, sizes, ranges of values, duplicates:",
            _command("data", "inspect", "--root", str(data["root"])),
        )
    rate = (run.experiment.get("train") or {}).get("lr")
    if not rate:
        return
    for words, factor in (("larger", 10.0), ("smaller", 0.1)):
        again = _command("run", file, "--lr", f"{factor * float(rate):g}")
        yield f"Try a learning rate ten times {words} than {float(rate):g}:", again


def _methods(run: RunRecord) -> str:
    return ",".join(dict.fromkeys(["fedavg", run.method]))


def _data_flags(run: RunRecord) -> list[str]:
    data: dict[str, Any] = run.experiment.get("data") or {}
    flags = ["--data", str(data.get("source"))]
    flags += ["--root", str(data["root"])] if data.get("root") else []
    test, val = (",".join(run.held_out(split)) for split in (TEST, VAL))
    if test:
        flags += ["--hold-out", f"val={val},test={test}" if val else test]
    rounds = run.rounds_planned
    return flags + (["--rounds", str(rounds)] if rounds else [])


def _comparison_steps(results: Results, decided: bool) -> Iterator[Step]:
    folders = {result.run.folder.parent for result in results.results}
    plan = folders.pop() / "plan.yaml" if len(folders) == 1 else None
    if plan is None or not plan.is_file():
        return
    again = ("compare", str(plan), "--out", str(plan.parent))
    if results.open:
        yield "Carry out what is missing; complete runs are kept:", _command(*again)
    kinds = {one.kind for method in results.methods for one in method_findings(results, method)}
    planned = {result.run.rounds_planned for result in results.results}
    if FindingKind.RISING in kinds and len(planned) == 1 and (rounds := planned.pop()):
        longer = (*again[:3], f"{plan.parent}-longer", "--rounds", str(2 * rounds))
        yield "Accuracy still rose in some runs: train twice as long:", _command(*longer)
    if not decided and len(results.methods) > 1:
        seeds = max(2 * len(results.seeds), REPEATS)
        yield (
            f"These runs do not decide. Use {number(seeds)} seeds; complete runs are kept:",
            _command(*again, "--seeds", str(seeds)),
        )


def _command(*words: str) -> str:
    return shlex.join(["feddg", *words])
