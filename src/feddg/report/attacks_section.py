"""What attacks on a run found, as tables."""

import math
from collections.abc import Iterator, Sequence
from itertools import cycle

from feddg.records import AttackRow, DifferenceRow, InversionRow, MembershipRow, ReconstructionRow
from feddg.report.blocks import Cell, Chart, Column, Table
from feddg.report.charts import HELD_OUT_COLOURS, TRAINING_COLOURS, chart_of, line_of
from feddg.report.wording import MISSING, number

FED_WORDS = {
    "sent": "what was sent",
    "sample": "each image's own",
    "unrelated": "an unrelated image's (chance)",
}
READERS = {"server": "the server", "client": "another client"}
CHANCE = 0.5
TOO_WIDE = 0.3
"""An interval of ranks or of AUC from which nothing can be told."""


def attack_tables(rows: Sequence[AttackRow]) -> list[Table]:
    """A table for each kind of attack that was made."""
    reconstructions = [row for row in rows if isinstance(row, ReconstructionRow)]
    differences = [row for row in rows if isinstance(row, DifferenceRow)]
    inversions = [row for row in rows if isinstance(row, InversionRow)]
    members = [row for row in rows if isinstance(row, MembershipRow)]
    tables = [
        _reconstructions(reconstructions) if reconstructions else None,
        _differences(differences) if differences else None,
        _inversions(inversions) if inversions else None,
        _memberships(members) if members else None,
    ]
    return [table for table in tables if table is not None]


def _reconstructions(rows: Sequence[ReconstructionRow]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.scores))
    columns = [Column(name, numeric=False) for name in ("Read", "By", "Drawn from", "Domain")]
    columns += [Column("Images"), Column("PSNR", "dB"), Column("SSIM")]
    columns += [Column(name) for name in names]
    columns += [Column("Rank", "0.5 is chance"), Column("Found first", "chance")]
    cells = [
        [
            *(Cell(text) for text in (row.entry, READERS[row.attacker], FED_WORDS[row.fed])),
            Cell(row.domain),
            Cell(number(row.images)),
            Cell(_short(row.psnr, 1)),
            Cell(_short(row.ssim, 3)),
            *(Cell(_short(row.scores.get(name), 3)) for name in names),
            Cell(_with_interval(row.rank, row.rank_low, row.rank_high)),
            Cell(f"{_short(row.first, 2)} ({_short(row.first_chance, 2)})"),
        ]
        for row in rows
    ]
    return Table(
        columns,
        cells,
        "Images drawn again from what was sent beside weights. Higher PSNR and SSIM, and lower "
        "distances, mean more alike. Rank: share of the domain's other images that are nearer to "
        "the drawn one than the true image, with its 95 % interval over clients. A name in "
        "brackets is the network that judged; FID, KID, IS and LPIPS stand for the published ones.",
    )


def _differences(rows: Sequence[DifferenceRow]) -> Table:
    columns = [Column("Read", numeric=False), Column("By", numeric=False)]
    columns += [Column("Metric", numeric=False), Column("Image's own minus sent"), Column("Images")]
    cells = [
        [
            Cell(row.entry),
            Cell(READERS[row.attacker]),
            Cell(row.metric),
            Cell(_with_interval(row.mean, row.low, row.high, 3)),
            Cell(number(row.images)),
        ]
        for row in rows
    ]
    return Table(
        columns,
        cells,
        "How much more an image's own vector would have given away than what was sent, on the same "
        "true images: mean over clients with its 95 % interval. Where the interval of rank lies "
        "below 0, what was sent hides images better than their own vectors would.",
    )


def _inversions(rows: Sequence[InversionRow]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.scores))
    columns = [Column("Images behind an update"), Column("Step", numeric=False), Column("Images")]
    columns += [Column("PSNR", "dB"), Column("of another update", "chance"), Column("SSIM")]
    columns += [Column(name) for name in names] + [Column("Rank", "0.5 is chance")]
    cells = [
        [
            Cell(number(row.batch_size)),
            Cell("the run's optimizer" if row.optimizer == "own" else "plain SGD"),
            Cell(number(row.images)),
            Cell(_short(row.psnr, 1)),
            Cell(_short(row.unrelated_psnr, 1)),
            Cell(_short(row.ssim, 3)),
            *(Cell(_short(row.scores.get(name), 3)) for name in names),
            Cell(_with_interval(row.rank, row.rank_low, row.rank_high)),
        ]
        for row in sorted(rows, key=lambda row: (row.optimizer, row.batch_size))
    ]
    return Table(
        columns,
        cells,
        "Images searched for in single clients' updates (gradient inversion): one step on the "
        "whole batch, labels known, no augmentation, which favours the attacker.",
    )


def _memberships(rows: Sequence[MembershipRow]) -> Table:
    columns = [Column("Read", numeric=False), Column("Attack", numeric=False)]
    columns += [Column("AUC", "0.5 is chance"), Column("Found at 1 % false alarms", "chance: 1 %")]
    columns += [Column("Clients"), Column("Members"), Column("Others")]
    cells = [
        [
            Cell(row.entry),
            Cell(row.attack),
            Cell(_with_interval(row.auc, row.low, row.high)),
            Cell(f"{100 * row.early:.1f} %"),
            *(Cell(number(count)) for count in (row.clients, row.members, row.others)),
        ]
        for row in rows
    ]
    return Table(
        columns,
        cells,
        "Whether what a client sends tells that an image was its own: area under the ROC curve, "
        "mean over clients with its 95 % interval.",
    )


def roc_chart(rows: Sequence[AttackRow]) -> Chart | None:
    """The ROC curves of the membership attacks above the line of chance; None without any."""
    found = [row for row in rows if isinstance(row, MembershipRow) and row.curve]
    if not found:
        return None
    colours = cycle((*HELD_OUT_COLOURS, *TRAINING_COLOURS))
    lines = [
        line_of(row.curve, f"{row.entry}, {row.attack}", colour)
        for row, colour in zip(found, colours)
    ]
    lines.append(line_of(((0, 0), (1, 1)), "chance", "#888888", width=1))
    layout = {
        "showlegend": True,
        "xaxis": {"title": {"text": "others taken for members"}, "range": [0, 1]},
        "yaxis": {"title": {"text": "members found"}, "range": [0, 1]},
    }
    caption = (
        "Membership: share of a client's own images that were found, against the share of others "
        "taken for them. On the line of chance nothing is told."
    )
    return chart_of(lines, layout, 360 + 12 * len(lines), caption)


def learned(rows: Sequence[AttackRow], key: str) -> str:
    """What attacks learned from one kind of message, in a few words; empty if none was made.

    Args:
        rows: of all attacks.
        key: ``purpose/name`` of the entry, or ``update/weights``.
    """
    return "; ".join(_findings(rows, key))


def _findings(rows: Sequence[AttackRow], key: str) -> Iterator[str]:
    for row in rows:
        if isinstance(row, ReconstructionRow) and row.entry == key:
            if row.fed == "sent" and row.domain == "all":
                verdict = _against_chance(row.rank_low, row.rank_high)
                yield (
                    f"images drawn by {READERS[row.attacker]} point {verdict} "
                    f"(rank {_with_interval(row.rank, row.rank_low, row.rank_high)}; 0.5 is chance)"
                )
        elif isinstance(row, InversionRow) and key == "update/weights":
            yield (
                f"images behind updates of {row.batch_size} found at {_short(row.psnr, 1)} dB "
                f"({_short(row.unrelated_psnr, 1)} dB is chance)"
            )
        elif isinstance(row, MembershipRow) and row.entry == key:
            verdict = "told" if row.low > CHANCE else "not told for certain"
            yield (
                f"membership {verdict} by {row.attack} "
                f"(AUC {_with_interval(row.auc, row.low, row.high)}; 0.5 is chance)"
            )


def _against_chance(low: float, high: float) -> str:
    if high < CHANCE:
        return "to the true ones"
    if not high - low < TOO_WIDE:
        return "nowhere that could be told from so few clients"
    return "to the true ones no better than chance, as far as could be told"


def _with_interval(mean: float, low: float, high: float, digits: int = 2) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return _short(mean, digits)
    return f"{_short(mean, digits)} [{_short(low, digits)}, {_short(high, digits)}]"


def _short(value: float | None, digits: int) -> str:
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:.{digits}f}"
