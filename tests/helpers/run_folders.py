"""Run folders made up for tests of what reads them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from feddg.evaluation.metrics import Predictions, measure
from feddg.records import (
    EMA,
    LAST,
    SWA,
    BadImageRow,
    ClientRow,
    ClientsTable,
    Direction,
    LayoutRow,
    LedgerRow,
    MessageRow,
    MetricRow,
    NumberRow,
    RefusedUpdate,
    RoundRecord,
    RoundRow,
    SetupRow,
    SummaryFile,
    TensorEntry,
)
from feddg.runs.folder import RunFolder
from feddg.runs.reading import Run, read_run
from feddg.runs.summary import summarize
from feddg.runs.table import NumberTable


@dataclass
class FolderMaker:
    """Writes a run folder as a run would; tests change the fields before ``write``.

    Accuracies follow a formula a test can repeat: ``accuracy(split, domain index, round)``.
    """

    folder: Path
    method: str = "pardon"
    rounds: int = 6
    planned: int = 6
    test: list[str] = field(default_factory=lambda: ["photo"])
    val: list[str] = field(default_factory=lambda: ["art_painting"])
    training: list[str] = field(default_factory=lambda: ["cartoon", "sketch"])
    classes: list[str] = field(default_factory=lambda: ["dog", "elephant", "horse"])
    clients: int = 10
    per_round: int = 4
    status: str | None = "completed"
    pictures: int = 1
    alpha: float | None = None
    gain: float = 0.0
    seed: int = 0
    heterogeneity: float = 0.1
    hyper_parameters: dict[str, Any] = field(default_factory=lambda: {"gamma1": 1.0})

    def accuracy(self, split: str, domain: int, round_: int, weights: str = LAST) -> float:
        level = {"test": 0.55, "val": 0.6, "id_val": 0.8, "id_test": 0.79}[split] + self.gain
        level += {LAST: 0.0, SWA: 0.03, EMA: 0.02}[weights]
        start = 1 / len(self.classes)
        wobble = 0.02 * math.sin(3 * round_ + domain + len(split))
        return round(start + (level - start) * (1 - math.exp(-round_ / 3)) + wobble, 4)

    def write(self) -> Path:
        with RunFolder(self.folder) as folder:
            folder.replace("experiment.yaml", yaml.safe_dump(self.experiment(), sort_keys=False))
            folder.write_json("environment.json", ENVIRONMENT)
            folder.write_json("clients.json", self.client_table())
            folder.replace_rows("rounds.jsonl", [self.setup_row(), *self.round_rows()])
            folder.replace_rows("metrics.jsonl", self.metric_rows())
            folder.replace_rows("ledger.jsonl", self.ledger_rows())
            if self.pictures:
                self._draw(folder)
            if self.status:
                folder.write_json("summary.json", self.summary())
        return self.folder

    def experiment(self) -> dict[str, Any]:
        return {
            "name": None,
            "data": {"source": "pacs", "image_size": 64},
            "hold_out": {"test": self.test, "val": self.val},
            "clients": {
                "number": self.clients,
                "per_round": self.per_round,
                "partition": "heterogeneous",
                "heterogeneity": self.heterogeneity,
                "alpha": self.alpha,
            },
            "method": {"name": self.method, "settings": self.hyper_parameters},
            "model": {"backbone": "resnet18", "weights": "imagenet", "embedding": "linear"},
            "train": {"rounds": self.planned, "local_epochs": 1, "optimizer": "adam", "lr": 0.0001},
            "evaluate": {"every": 1},
            "seed": self.seed,
        }

    def client_table(self) -> ClientsTable:
        domains = [*self.test, *self.val, *self.training]
        rows = []
        for client in range(self.clients):
            counts = [0] * (len(self.test) + len(self.val)) + [
                60 if client % len(self.training) == index else 5 + client % 3
                for index in range(len(self.training))
            ]
            per_class = [sum(counts) // len(self.classes)] * len(self.classes)
            rows.append(ClientRow(id=client, domains=counts, classes=per_class))
        bad = [BadImageRow(path="sketch/dog/broken.jpg", reason="truncated")]
        return ClientsTable(domains=domains, classes=self.classes, clients=rows, bad_images=bad)

    def setup_row(self) -> SetupRow:
        even, odd = (tuple(range(start, self.clients, 2)) for start in (0, 1))
        return SetupRow(seconds=2.5, bytes=SETUP_BYTES, groups={"style": (even, odd)})

    def round_rows(self) -> list[RoundRecord]:
        return [self.round_row(round_) for round_ in range(1, self.rounds + 1)]

    def metric_rows(self) -> list[MetricRow]:
        rows = [row for round_ in range(self.rounds + 1) for row in self.number_rows(round_)]
        if self.rounds == self.planned:
            rows += [*self.number_rows(self.rounds, SWA), *self.number_rows(self.rounds, EMA)]
        return rows

    def spent(self, round_: int) -> dict[str, float]:
        clients = [len(self.chosen(one)) for one in range(1, round_ + 1)]
        return {
            "images": 65 * sum(clients),
            "bytes": SETUP_BYTES + 2 * UPDATE_BYTES * sum(clients),
            "seconds": 2.5 + sum(clients) + 0.1 * round_,
        }

    def number_rows(self, round_: int, weights: str = LAST) -> list[MetricRow]:
        parts = {"test": self.test, "val": self.val}
        parts |= {"id_val": self.training, "id_test": self.training}
        return [
            row
            for split, domains in parts.items()
            for index, domain in enumerate(domains)
            for row in self._numbers(round_, split, index, domain, weights)
        ]

    def _numbers(
        self, round_: int, split: str, index: int, domain: str, weights: str
    ) -> list[MetricRow]:
        accuracy = self.accuracy(split, index, round_, weights)
        confusion = self.confusion() if round_ == self.rounds else None
        return numbers(
            round_,
            split,
            domain,
            accuracy,
            examples=400 + index,
            weights=weights,
            confusion=confusion,
            loss=2 - accuracy,
            spent=self.spent(round_),
            **self.metrics(index, confusion),
        )

    def metrics(self, domain: int, confusion: list[list[int]] | None) -> dict[str, float]:
        known = measure(Predictions(np.array(confusion))) if confusion else {}
        names = ("balanced_accuracy", "largest_class_share")
        return {name: known[name] for name in names if name in known}

    def confusion(self) -> list[list[int]]:
        size = len(self.classes)
        return [
            [
                50 + 7 * true if true == guess else (3 * true + 5 * guess) % 11
                for guess in range(size)
            ]
            for true in range(size)
        ]

    def chosen(self, round_: int) -> list[int]:
        return sorted({(round_ * 3 + step * 7) % self.clients for step in range(self.per_round)})

    def round_row(self, round_: int) -> RoundRow:
        chosen = self.chosen(round_)
        fade = math.exp(-round_ / 4)
        refused = [RefusedUpdate(client=chosen[0], reason="not finite")] if round_ == 2 else []
        return RoundRow(
            round=round_,
            clients=chosen,
            refused=refused,
            terms={"cross_entropy": 1.5 * fade, "triplet": 0.4 * fade, "regularizer": 0.1},
            examples=60 * len(chosen),
            images=65 * len(chosen),
            seconds={"train": float(len(chosen)), "aggregate": 0.1, "evaluate": 0.5},
            bytes_up=UPDATE_BYTES * len(chosen),
            bytes_down=UPDATE_BYTES * len(chosen),
        )

    def ledger_rows(self) -> list[LedgerRow]:
        rows: list[LedgerRow] = list(LAYOUTS)
        for client in range(self.clients):
            rows.append(_message(0, "up", client, "statistics", "ab01", 1024))
            rows.append(_message(0, "down", client, "context", "ab01", 1024))
        for round_ in range(1, self.rounds + 1):
            for client in self.chosen(round_):
                rows.append(_message(round_, "down", client, "train", "ab02", UPDATE_BYTES))
                rows.append(_message(round_, "up", client, "update", "ab03", UPDATE_BYTES + 8))
        return rows

    def messages(self) -> list[MessageRow]:
        return [row for row in self.ledger_rows() if isinstance(row, MessageRow)]

    def summary(self) -> SummaryFile:
        total = 4.0 + 4.6 * self.rounds
        error = "Loss is not a number." if self.status == "failed" else None
        took = {"total": total}
        found = summarize(read_run(self.folder), str(self.status), error, took)
        return found.model_copy(update={"peak_memory_bytes": 1_234_000_000})

    def _draw(self, folder: RunFolder) -> None:
        figures = self.folder / "figures"
        figures.mkdir(exist_ok=True)
        captions = {}
        for number in range(self.pictures):
            name = f"styles-{number}.png"
            Image.new("RGB", (48, 16), (40 * number, 90, 120)).save(figures / name)
            captions[name] = f"Style picture {number}: before and after."
        folder.write_json("figures/captions.json", captions)


def _message(
    round_: int, direction: Direction, client: int, purpose: str, layout: str, size: int
) -> MessageRow:
    return MessageRow(
        round=round_,
        direction=direction,
        client=client,
        purpose=purpose,
        layout=layout,
        bytes=size,
    )


SETUP_BYTES = 10 * 2 * 1024
UPDATE_BYTES = 4 * (64 * 27 + 64)
ENVIRONMENT = {
    "feddg": "0.1.0",
    "python": "3.11.9",
    "torch": "2.15.0",
    "cores": 2,
    "device": "cpu",
    "precision": "float32",
    "command": "feddg run --method pardon",
}
_WEIGHTS = (
    TensorEntry(name="weights/conv.weight", shape=(64, 3, 3, 3), dtype="float32", bytes=6912),
    TensorEntry(name="weights/conv.bias", shape=(64,), dtype="float32", bytes=256),
)
_STYLE = (TensorEntry(name="style", shape=(2, 128), dtype="float32", bytes=1024),)
LAYOUTS = (
    LayoutRow(id="ab01", tensors=_STYLE),
    LayoutRow(id="ab02", tensors=_WEIGHTS),
    LayoutRow(id="ab03", tensors=_WEIGHTS, scalars=("examples",)),
)


def numbers(
    round_: int,
    split: str,
    domain: str,
    accuracy: float,
    examples: int = 10,
    weights: str = LAST,
    confusion: list[list[int]] | None = None,
    spent: dict[str, float] | None = None,
    **metrics: float,
) -> list[MetricRow]:
    """The rows of one domain after one round, as an evaluation writes them."""
    of = {"round": round_, "weights": weights, "split": split, "domain": domain}
    of |= spent or {"images": 0, "bytes": 0, "seconds": 0}
    of |= {"examples": examples}
    return [
        MetricRow(metric="accuracy", value=accuracy, confusion=confusion, **of),
        *(MetricRow(metric=name, value=value, **of) for name, value in metrics.items()),
    ]


def accuracy_rows(run: Run, round_: int, split: str) -> Sequence[NumberRow]:
    """The rows of a run's accuracies after a round, one per domain of a split."""
    return run.table.where(weights=LAST, round=round_, split=split, metric="accuracy").rows


def table_of(*parts: list[MetricRow], **selection: str) -> NumberTable:
    """A run's table of the rows of some domains."""
    return NumberTable((row for rows in parts for row in rows), **selection)


def accuracies(split="test", **by_rule):
    """The numbers of a results file: accuracies on a split by selection rule, and no others."""
    of = {"split": split, "over": "domain_mean", "metric": "accuracy"}
    return tuple(NumberRow(rule=rule, value=value, **of) for rule, value in by_rule.items())


class ConstantMaker(FolderMaker):
    """A run whose model always names the class that is 60 % of the images, from round 1 on."""

    def accuracy(self, split, domain, round_, weights="last"):
        return 0.6 if round_ else 1 / 3

    def confusion(self):
        return [[240, 0, 0], [100, 0, 0], [60, 0, 0]]


class RisingMaker(FolderMaker):
    """A run whose accuracy rises to its last round."""

    def accuracy(self, split, domain, round_, weights="last"):
        return 0.4 + 0.07 * round_ + self.gain
