"""The command line: thin, no logic of its own. Heavy imports wait until a command needs them."""

import json
import logging
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from feddg.errors import ExperimentError, FeddgError

if TYPE_CHECKING:
    from feddg.experiment import Experiment
    from feddg.runs.observer import Observer

app = typer.Typer(
    name="feddg",
    help="Federated domain generalization: train together, recognise a domain nobody trained on.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Look at images before training.", no_args_is_help=True)
style_app = typer.Typer(
    help="Train a style codec, or re-draw images with one.", no_args_is_help=True
)
app.add_typer(data_app, name="data")
app.add_typer(style_app, name="style")
deploy_app = typer.Typer(help="The same federation across a network.", no_args_is_help=True)
app.add_typer(deploy_app, name="deploy")

OutOption = Annotated[Path, typer.Option("--out", help="The run folder's parent.")]
TrackOption = Annotated[
    str | None,
    typer.Option(
        help="Also follow runs with mlflow, wandb (extras of the package).", envvar="FEDDG_TRACK"
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")]


class Normalization(StrEnum):
    """Batch statistics during training."""

    auto = "auto"
    train = "train"
    frozen = "frozen"


def _option(flag: str, help: str, panel: str) -> Any:
    return typer.Option(flag, help=help, rich_help_panel=panel)


def _data(flag: str, help: str) -> Any:
    return _option(flag, help, "Data")


def _clients(flag: str, help: str) -> Any:
    return _option(flag, help, "Clients")


def _training(flag: str, help: str) -> Any:
    return _option(flag, help, "Model and training")


@app.command()
def run(
    experiment: Annotated[Path | None, typer.Argument(help="Experiment file (YAML).")] = None,
    method: Annotated[
        str | None, typer.Option("--method", "-m", help="Method; see `feddg methods`.")
    ] = None,
    data: Annotated[
        str | None, _data("--data", "digits, pacs, folder, or a registered source.")
    ] = None,
    root: Annotated[
        Path | None, _data("--root", "The images' folder: root/domain/class/*.jpg.")
    ] = None,
    hold_out: Annotated[
        str | None, _data("--hold-out", "Unseen domain(s): sketch, or val=art_painting,test=photo.")
    ] = None,
    split_file: Annotated[Path | None, _data("--split-file", "A benchmark's split CSV.")] = None,
    image_size: Annotated[
        int | None, _data("--image-size", "Side of the training images, pixels.")
    ] = None,
    clients: Annotated[int | None, _clients("--clients", "Number of clients, N.")] = None,
    clients_per_round: Annotated[
        int | None, _clients("--clients-per-round", "Sampled per round, K.")
    ] = None,
    heterogeneity: Annotated[
        float | None,
        _clients("--heterogeneity", "Lambda: 1 = all clients alike, 0 = one domain each."),
    ] = None,
    alpha: Annotated[
        float | None, _clients("--alpha", "Dirichlet concentration over labels.")
    ] = None,
    partition: Annotated[
        str | None, _clients("--partition", "heterogeneous, or domain (one each).")
    ] = None,
    rounds: Annotated[int | None, _training("--rounds", "Rounds, R.")] = None,
    local_epochs: Annotated[
        int | None, _training("--local-epochs", "Local epochs per round.")
    ] = None,
    local_steps: Annotated[
        int | None, _training("--local-steps", "Optimizer steps instead of epochs.")
    ] = None,
    batch_size: Annotated[int | None, _training("--batch-size", "Images per batch.")] = None,
    optimizer: Annotated[str | None, _training("--optimizer", "adam or sgd.")] = None,
    lr: Annotated[float | None, _training("--lr", "Client learning rate.")] = None,
    backbone: Annotated[str | None, _training("--backbone", "cnn, or a torchvision model.")] = None,
    weights: Annotated[
        str | None, _training("--weights", "none, imagenet, or a weights file.")
    ] = None,
    embedding: Annotated[
        str | None, _training("--embedding", "none, linear or bottleneck.")
    ] = None,
    normalization: Annotated[
        Normalization | None, _training("--normalization", "Batch statistics: auto, train, frozen.")
    ] = None,
    augmentation: Annotated[
        str | None, _training("--augmentation", "none, digits, pacs, office_home.")
    ] = None,
    eval_every: Annotated[int | None, typer.Option(help="Rounds between evaluations.")] = None,
    seed: Annotated[int | None, typer.Option(help="The experiment's seed.")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, ...")] = None,
    name: Annotated[str | None, typer.Option(help="Readable start of the folder's name.")] = None,
    preset: Annotated[str | None, typer.Option(help="Values of a data set's protocol.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any field: --set method.gamma1=0.5 --set train.momentum=0.9"),
    ] = None,
    out: OutOption = Path("runs"),
    snapshots: Annotated[
        str | None,
        typer.Option(help="Rounds whose model is kept for `feddg report --analyses`: 1,10,50."),
    ] = None,
    track: TrackOption = None,
    quiet: QuietOption = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="One line per evaluated round.")
    ] = False,
) -> None:
    """Run an experiment: from a file, from flags, or flags over a file.

    The run's folder holds everything about it. The same experiment is never run twice: a finished
    one is shown, an interrupted one continues.
    """
    said = {
        "name": name,
        "preset": preset,
        "method": {"name": method},
        "data": {
            "source": data, "root": root, "image_size": image_size, "split_file": split_file
        },
        "hold_out": _parse_hold_out(hold_out),
        "clients": {
            "number": clients,
            "per_round": clients_per_round,
            "heterogeneity": heterogeneity,
            "alpha": alpha,
            "partition": partition,
        },
        "model": {
            "backbone": backbone,
            "weights": weights,
            "embedding": embedding,
            "normalization": normalization and normalization.value,
        },
        "train": {
            "rounds": rounds,
            "local_epochs": local_epochs,
            "local_steps": local_steps,
            "batch_size": batch_size,
            "optimizer": optimizer,
            "lr": lr,
            "augmentation": augmentation,
        },
        "evaluate": {"every": eval_every},
        "seed": seed,
        "precision": precision,
        "device": device,
    }  # fmt: skip
    from feddg.experiment import load_experiment
    from feddg.settings import merge

    overrides = merge(_without_none(said), _parse_settings(settings or []))
    _track(track)
    kept = _parse_integers("--snapshots", snapshots) if snapshots else []
    _run(load_experiment(experiment, overrides), out, quiet, verbose, kept)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="The run folder.")], quiet: QuietOption = False
) -> None:
    """Continue an interrupted run from its last completed round."""
    from feddg.api import resume as resume_run

    with _resumable(folder):
        done = resume_run(folder, observer=_observer(quiet, False))
    _show([done.folder], done.report)


@app.command()
def compare(
    plan: Annotated[Path | None, typer.Argument(help="Plan file (YAML).")] = None,
    methods: Annotated[
        str | None, typer.Option("--methods", "-m", help="Methods: fedavg,ccst,pardon.")
    ] = None,
    data: Annotated[
        str | None, _data("--data", "digits, pacs, folder, or a registered source.")
    ] = None,
    root: Annotated[Path | None, _data("--root", "The images' folder.")] = None,
    hold_out: Annotated[
        str | None,
        _data("--hold-out", "lodo, ltdo, ltdo-all, or hold-outs apart: sketch;val=ink,test=photo."),
    ] = None,
    image_size: Annotated[int | None, _data("--image-size", "Side of the images, pixels.")] = None,
    clients: Annotated[
        str | None, _clients("--clients", "N, or N:K with K per round; several: 5:5,50:5.")
    ] = None,
    heterogeneity: Annotated[
        str | None, _clients("--heterogeneity", "Lambda, one or several: 0,0.1,1.")
    ] = None,
    rounds: Annotated[int | None, _training("--rounds", "Rounds, R.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="How many (3: seeds 0, 1, 2), or which: 7,8,9.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any field of every experiment: FIELD=VALUE.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the runs; comparisons/NAME if not said.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once.")] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and the estimate; run nothing.")
    ] = False,
    no_estimate: Annotated[bool, typer.Option("--no-estimate", help="Do not measure.")] = False,
    track: TrackOption = None,
    quiet: QuietOption = False,
) -> None:
    """Compare methods over scenarios and seeds: run what is missing, write tables and a report.

    Stop it at any moment and call it again: complete runs are kept, interrupted ones continue.
    """
    from rich.console import Console

    from feddg.comparing.compare import carry_out_work, prepare_work
    from feddg.comparing.plan import load_plan
    from feddg.comparing.pool import Watcher
    from feddg.console import ManyBars, print_comparison, print_work
    from feddg.report import write_comparison
    from feddg.settings import merge

    _track(track)
    said = _without_none(
        {
            "methods": methods and methods.split(","),
            "hold_out": _parse_hold_outs(hold_out),
            "clients": clients and [_parse_clients(part) for part in clients.split(",")],
            "heterogeneity": heterogeneity and [float(v) for v in heterogeneity.split(",")],
            "seeds": _parse_seeds(seeds),
        }
    )
    fields = {
        "data": {"source": data, "root": root, "image_size": image_size},
        "train": {"rounds": rounds},
    }
    overrides = merge(_without_none(fields), _parse_settings(settings or []))
    base = load_plan(plan).model_dump() if plan else {}
    work = prepare_work(load_plan(base | said), out, overrides)
    console = Console(stderr=True)
    print_work(console, work, jobs, measure=not no_estimate)
    if dry_run:
        return
    try:
        watcher = Watcher() if quiet else ManyBars(console)
        done = carry_out_work(work, jobs=jobs, watcher=watcher)
        write_comparison(work.out)
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    print_comparison(done)
    if done.failures:
        raise typer.Exit(1)


@app.command()
def demo(
    out: OutOption = Path("runs"),
    hold_out: Annotated[str, typer.Option(help="Which digits nobody trains on.")] = "sketch",
    rounds: Annotated[int | None, typer.Option(help="Rounds of each method.")] = None,
    seed: Annotated[int, typer.Option(help="The experiments' seed.")] = 0,
    quiet: QuietOption = False,
) -> None:
    """FedAvg against PARDON on scanned digits drawn in four ways. Offline, about a minute."""
    from feddg.experiment import Experiment
    from feddg.report import write_report
    from feddg.runs.execute import run as run_experiment

    folders = []
    train = {} if rounds is None else {"train": {"rounds": rounds}}
    for method in ("fedavg", "pardon"):
        chosen = Experiment(data="digits", method=method, hold_out=hold_out, seed=seed, **train)
        with _resumable(out / chosen.label):
            folders.append(run_experiment(chosen, out, observer=_observer(quiet, False)).folder)
    _show(folders, write_report(folders, out / f"demo-{hold_out}-s{seed}.html"))


@app.command()
def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """List the methods: names, aliases, one line each."""
    from feddg.methods.registry import methods as all_methods

    known = all_methods()
    if as_json:
        rows = [
            {
                "name": name,
                "aliases": list(method.aliases),
                "summary": method.summary,
                "settings": method.Settings.model_json_schema().get("properties", {}),
            }
            for name, method in known.items()
        ]
        _print_json(rows)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("method", "aliases", "in one line", box=None, pad_edge=False)
    for name, method in known.items():
        table.add_row(f"[bold]{name}[/]", ", ".join(method.aliases), method.summary)
    Console().print(table)


@app.command()
def evaluate(
    folder: Annotated[Path, typer.Argument(help="The run folder.")],
    adapt: Annotated[
        list[str] | None,
        typer.Option("--adapt", help="`feddg adaptations`, or fixed:alpha=0.3; all by default."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 64,
    personal: Annotated[
        bool, typer.Option("--personal", help="Each client's domain under its own statistics.")
    ] = False,
    alphas: Annotated[
        bool, typer.Option("--alphas", help="Write how far each layer adapts to each image.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Measure a run's model under test-time adaptations; kept in its adaptation.jsonl."""
    from dataclasses import asdict

    from rich.console import Console

    from feddg.console import adaptation_table
    from feddg.report import write_report
    from feddg.studies.evaluate import evaluate_run

    found = evaluate_run(folder, adapt, batch_size=batch_size, personal=personal, alphas=alphas)
    if as_json:
        _print_json([asdict(score) for score in found.scores])
        return
    Console().print(adaptation_table(found))
    for reason in found.refused.values():
        typer.echo(reason)
    typer.echo(f"report: {write_report([folder], folder / 'report.html').resolve()}")


@app.command()
def adaptations() -> None:
    """List the test-time adaptations: what each needs, what it changes, what it costs."""
    from rich.console import Console
    from rich.table import Table

    from feddg.evaluation.adaptation import ADAPTATIONS

    table = Table("name", "in one line", "needs", "remembers", "beside one forward pass", box=None)
    for name, kind in ADAPTATIONS.items():
        table.add_row(f"[bold]{name}[/]", kind.summary, kind.needs, kind.changes, kind.cost)
    Console().print(table)


@app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="A run folder, several, or one of `feddg compare`."),
    ],
    out: Annotated[Path | None, typer.Option(help="The page to write.")] = None,
    tables: Annotated[
        Path | None, typer.Option(help="Also write its tables here: Markdown, CSV, LaTeX.")
    ] = None,
    analyses: Annotated[
        bool,
        typer.Option(
            "--analyses", help="First look into the run: t-SNE, loss landscape, grey levels."
        ),
    ] = False,
    beside: Annotated[
        Path | None, typer.Option(help="A run whose model stands in the loss landscape.")
    ] = None,
) -> None:
    """Write the HTML page of one run, or of several: side by side, or as statistics."""
    from feddg.report import page_about, write_page, write_tables

    if analyses or beside:
        from rich.console import Console

        from feddg.console import working
        from feddg.studies.analyses import analyse

        with working(Console(stderr=True)) as progress:
            for folder in folders:
                analyse(folder, beside=beside, progress=progress)
    page = page_about(folders)
    path = out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    if tables is not None:
        write_tables(page, tables)
    typer.echo(write_page(page, path))


@data_app.command("inspect")
def inspect_data(
    data: Annotated[str, typer.Option("--data", help="digits, pacs, folder, ...")] = "folder",
    root: Annotated[Path | None, typer.Option(help="The images' folder.")] = None,
    hold_out: Annotated[str | None, typer.Option(help="To see who would train on what.")] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    heterogeneity: Annotated[float | None, typer.Option(help="Lambda.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Dirichlet concentration.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Count images per domain and class, find bad files, show how clients would look."""
    from feddg.experiment import Experiment
    from feddg.studies.inspection import inspect_experiment, print_inspection

    chosen = {"number": clients, "heterogeneity": heterogeneity, "alpha": alpha}
    experiment = Experiment(
        data=_without_none({"source": data, "root": root}),
        hold_out=_parse_hold_out(hold_out) or {},
        clients=_without_none(chosen),
        model={"weights": None},
        seed=seed,
    )
    found = inspect_experiment(experiment)
    if as_json:
        _print_json(found)
    else:
        print_inspection(found)


@style_app.command("train")
def style_train(
    content: Annotated[list[Path], typer.Option(help="Folder(s) of photographs.")],
    style: Annotated[list[Path], typer.Option(help="Folder(s) of pictures in other styles.")],
    out: Annotated[Path, typer.Option(help="Folder for weights, loss curve and saved state.")],
    steps: Annotated[int, typer.Option(help="Training steps.")] = 4000,
    size: Annotated[list[int], typer.Option(help="Side(s) of the training crops, pixels.")] = [64],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Seed.")] = 0,
    codec: Annotated[str, typer.Option(help="Which codec to train: compact or vgg19.")] = "compact",
    encoder: Annotated[Path | None, typer.Option(help="The encoder's first weights.")] = None,
    decoder: Annotated[Path | None, typer.Option(help="The decoder's first weights.")] = None,
    loss_network: Annotated[
        Path | None,
        typer.Option(help="VGG-19-like encoder that judges; with it, the encoder is trained too."),
    ] = None,
    critic: Annotated[float, typer.Option(min=0, help="Weight of an adversary; 0 for none.")] = 0,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between saved states.")] = 250,
) -> None:
    """Train a codec on folders of content and style images; run again to go on."""
    from rich.progress import Progress

    from feddg.styles.codec_training import Recipe, train_codec

    sizes = tuple(size)
    recipe = Recipe(codec, steps=steps, seed=seed, sizes=sizes, critic_weight=critic)
    with Progress(transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("training the codec", total=steps)
        result = train_codec(
            content=content,
            style=style,
            out=out,
            recipe=recipe,
            encoder=encoder,
            start=decoder,
            loss_network=loss_network,
            progress=lambda state: progress.update(task, completed=state.step),
            save_every=save_every,
        )
    typer.echo(result)


@style_app.command("transfer")
def style_transfer(
    images: Annotated[Path, typer.Argument(help="An image or a folder of images to re-draw.")],
    style: Annotated[Path, typer.Option(help="An image, or a folder whose pooled style to take.")],
    out: Annotated[Path, typer.Option(help="Folder for the re-drawn images.")],
    strength: Annotated[float, typer.Option(min=0, max=1, help="AdaIN blend.")] = 1.0,
    size: Annotated[int, typer.Option(help="Side of the square results, pixels.")] = 128,
    codec: Annotated[str, typer.Option(help="compact, vgg19 or colors.")] = "compact",
    encoder: Annotated[Path | None, typer.Option(help="Encoder weights.")] = None,
    decoder: Annotated[Path | None, typer.Option(help="Decoder weights.")] = None,
) -> None:
    """Re-draw images in the style of another image, or of a folder of images."""
    from feddg.studies.redraw import redraw_files

    written = redraw_files(
        images, style, out, strength, size, codec=codec, encoder=encoder, decoder=decoder
    )
    typer.echo(f"{len(written)} images written to {out}")


@deploy_app.command("init")
def deploy_init(
    folder: Annotated[Path, typer.Argument(help="Folder for the Flower app; must not hold one.")],
    experiment: Annotated[Path, typer.Option(help="Experiment file (YAML).")],
    site: Annotated[list[str], typer.Option(help="A site's name; once per site, in order.")],
    address: Annotated[str, typer.Option(help="HOST:PORT of the coordinator.")] = "127.0.0.1:8000",
    test: Annotated[
        str, typer.Option(help="The coordinator's test folder, or digits:DOMAIN.")
    ] = "",
    min_sites: Annotated[int, typer.Option(min=0, help="Sites needed; 0 for all.")] = 0,
    evaluation_site: Annotated[
        list[str] | None, typer.Option(help="A site that never trains and reports the accuracy.")
    ] = None,
    out: OutOption = Path("runs"),
) -> None:
    """Write the Flower app of a federation, a script for its certificates, and start lines."""
    from feddg.experiment import load_experiment
    from feddg.flower.app_folder import deployment_fields, write_app

    chosen = load_experiment(experiment, deployment_fields(site))
    write_app(
        folder,
        chosen,
        site,
        address=address,
        out=out,
        test=test,
        min_sites=min_sites,
        judges=evaluation_site or [],
    )
    typer.echo(f"written to {folder}; how to start it: {folder / 'START.md'}")


@deploy_app.command("simulate")
def deploy_simulate(
    experiment: Annotated[Path, typer.Argument(help="Experiment file (YAML).")],
    out: OutOption = Path("runs"),
    cpus: Annotated[int, typer.Option(min=1, help="Cores per client.")] = 1,
    gpus: Annotated[float, typer.Option(min=0, help="Share of a GPU per client.")] = 0.0,
) -> None:
    """Run an experiment over Flower's simulation (Ray), clients side by side."""
    from feddg.experiment import load_experiment
    from feddg.flower.simulation import simulate

    chosen, watching = load_experiment(experiment), _observer(quiet=False, verbose=True)
    done = simulate(chosen, out, observer=watching, cpus=cpus, gpus=gpus)
    _show([done.folder], done.report)


def _run(
    experiment: "Experiment", out: Path, quiet: bool, verbose: bool, snapshots: list[int]
) -> None:
    from feddg.api import run as run_experiment
    from feddg.runs.execute import is_complete

    folder = out / experiment.label
    if is_complete(folder):
        typer.echo(f"{folder} is complete; nothing is run again", err=True)
    with _resumable(folder):
        done = run_experiment(
            experiment, out, observer=_observer(quiet, verbose), snapshots=snapshots
        )
    _show([done.folder], done.report)


def _track(names: str | None) -> None:
    # The environment reaches runs in processes of their own, too.
    if names is not None:
        os.environ["FEDDG_TRACK"] = names


class _resumable:
    """Says how to go on when Ctrl-C ends a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is KeyboardInterrupt:
            remedy = f"`feddg resume {self._folder}` goes on from the last completed round"
            typer.echo(f"interrupted; {remedy}", err=True)
            raise typer.Exit(130)


def _observer(quiet: bool, verbose: bool) -> "Observer":
    from rich.console import Console

    from feddg.console import Bars, Lines
    from feddg.runs.observer import Observer

    console = Console(stderr=True)
    if verbose:
        return Lines(console)
    return Observer() if quiet else Bars(console)


def _show(folders: list[Path], report: Path) -> None:
    from rich.console import Console

    from feddg.console import results_table

    Console().print(results_table(folders))
    for folder in folders:
        typer.echo(f"run folder: {folder}")
    typer.echo(f"report: {report.resolve()}")


def _parse_hold_out(text: str | None) -> dict[str, list[str]] | None:
    """Reads ``sketch``, ``art,sketch`` or ``val=art_painting,test=photo``."""
    if not text:
        return None
    held: dict[str, list[str]] = {"test": [], "val": []}
    role = "test"
    for part in text.split(","):
        before, equals, after = part.strip().partition("=")
        if equals and before not in held:
            raise ExperimentError(f"--hold-out {text}: {before!r} is neither val nor test")
        role = before if equals else role
        held[role].append(after if equals else before)
    return held


def _parse_hold_outs(text: str | None) -> Any:
    if text is None or text in ("lodo", "ltdo", "ltdo-all"):
        return text
    return [_parse_hold_out(part) for part in text.split(";")]


def _parse_clients(text: str) -> tuple[int, int | None]:
    number, _, per_round = text.partition(":")
    try:
        return int(number), int(per_round) if per_round else None
    except ValueError:
        raise ExperimentError(f"--clients {text}: write N, or N:K with K per round") from None


def _parse_seeds(text: str | None) -> Any:
    if text is None:
        return None
    seeds = _parse_integers("--seeds", text)
    return seeds if len(seeds) > 1 else seeds[0]


def _parse_integers(flag: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ExperimentError(f"{flag} {text}: write one or more numbers: 7,8,9") from None


def _parse_settings(pairs: list[str]) -> dict[str, Any]:
    """Reads ``a.b=value`` pairs into nested fields; values are YAML."""
    from feddg.settings import merge

    fields: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ExperimentError(f"--set {pair}: write FIELD=VALUE, for example train.lr=0.001")
        nested: Any = _number(value)
        for part in reversed(key.split(".")):
            nested = {part: nested}
        fields = merge(fields, nested)
    return fields


def _number(text: str) -> Any:
    try:
        return float(text) if "e" in text.lower() else yaml.safe_load(text)
    except ValueError:
        return yaml.safe_load(text)


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    kept = {k: _without_none(v) if isinstance(v, dict) else v for k, v in fields.items()}
    return {k: v for k, v in kept.items() if v is not None and v != {}}


def _print_json(content: Any) -> None:
    typer.echo(json.dumps(content, indent=1, ensure_ascii=False))


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {record.getMessage()}"


def main() -> None:
    """Runs the command line; a user's mistake ends in one line, not in a traceback."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Plain())
    logging.getLogger("feddg").addHandler(handler)
    try:
        app()
    except FeddgError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
