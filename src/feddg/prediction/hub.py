"""Writes a run's model as a folder for the Hugging Face hub: weights, config, model card."""

from pathlib import Path

from feddg.data.download import digest
from feddg.errors import AdaptationError, RunError
from feddg.prediction.card import TAG, model_card
from feddg.prediction.classifier import describe_model
from feddg.prediction.export import Exported
from feddg.prediction.model_file import write_weights
from feddg.runs.diagnostics import refuse_doubtful
from feddg.runs.model import load_trained
from feddg.runs.shared import (
    CONFIG,
    SCHEMA,
    WEIGHTS,
    AboutModel,
    SharedModel,
    is_shared,
    network_config,
)
from feddg.storage import file_faults, replace_file, replace_text

CARD = "README.md"


def save_model(
    run: Path | str,
    folder: Path,
    *,
    adapt: str | None = None,
    which: str | None = None,
    strict: bool = False,
) -> Exported:
    """Writes a run's model as a folder: weights, configuration, and a model card ``README.md``.

    ``feddg.load_model(folder)`` and `feddg predict` give the same bits as with the run. The folder
    contains no image names, clients or paths; see :mod:`feddg.runs.shared`.

    Args:
        run: the run folder.
        folder: a new folder, or an earlier one of this kind, whose files are replaced.
        adapt: refused, because the folder can be used with any adaptation.
        which: the selection rule of the model, see :func:`feddg.runs.model.load_model`.
        strict: whether to refuse a model with warnings.

    Raises:
        RunError: the run has no model to share, the folder contains other files, or ``strict`` and
            there are warnings.
        AdaptationError: ``adapt`` is given.
    """
    if adapt is not None:
        raise AdaptationError("the folder holds no adaptation: say --adapt where it is used")
    if is_shared(Path(run)):
        raise RunError(f"{run} is a folder of `feddg export --hub` already")
    card = folder / CARD
    if folder.exists() and not (
        folder.is_dir() and (is_shared(folder) or not any(folder.iterdir()))
    ):
        raise RunError(f"{folder} holds something else; name a new folder")
    if card.is_file() and TAG.encode() not in card.read_bytes():
        raise RunError(f"{card} is no model card, which is what would be written there")
    trained = load_trained(run, which=which)
    about = describe_model(Path(run), trained).model_copy(update={"format": "hub"})
    refuse_doubtful(about.diagnostics, strict)
    with file_faults(RunError, f"cannot write {folder}"):
        replace_file(folder / WEIGHTS, lambda aside: write_weights(aside, trained.network, about))
        config = SharedModel(
            feddg_model=SCHEMA,
            weights_sha256=digest(folder / WEIGHTS, "sha256"),
            network=network_config(trained.experiment, trained.method, trained.network),
            about=AboutModel.model_validate(about.fields()),
        )
        replace_text(folder / CONFIG, config.to_text())
        replace_text(card, model_card(run, about))
    return Exported(folder, card, about.fields(), 0, 0.0, about.diagnostics)
