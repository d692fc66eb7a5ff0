"""Costly looks into a finished run, made when asked for: features, loss landscape, grey levels.

The papers' figures; see :mod:`feddg.studies.feature_maps`, :mod:`feddg.studies.loss_landscape` and
:mod:`feddg.studies.grey_levels`. Their numbers go to ``analyses.json``.
"""

import json
from pathlib import Path

from feddg.errors import RunError
from feddg.messages import Weights
from feddg.methods.base import has_global_model, title_of
from feddg.runs.checkpoints import checkpoint_weights
from feddg.runs.prepare import Progress, cache_folder
from feddg.runs.reading import read_run
from feddg.runs.subject import Subject, load_subject
from feddg.storage import replace_text, why
from feddg.studies.feature_maps import feature_maps
from feddg.studies.grey_levels import grey_levels
from feddg.studies.loss_landscape import loss_landscape

ANALYSES = "analyses.json"


def analyse(
    folder: Path | str,
    *,
    beside: Path | str | None = None,
    cache: Path | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Path:
    """Looks into a completed run and writes ``analyses.json`` into its folder.

    Args:
        folder: the run.
        beside: another run with the same network (a FedAvg run, say), whose global weights become
            a point of the loss landscape; a second client of this run is used without it.
        cache: folder for decoded pixels and twins; the user's cache by default.
        progress: called with (what, done, total).

    Raises:
        FeddgError: the run has no model, or ``beside`` has another network.
    """
    subject = load_subject(Path(folder), cache or cache_folder(), progress)
    if not has_global_model(subject.method, subject.worker.network):
        name = subject.method.name
        raise RunError(f"{folder}: under {name} there is no global model to look into")
    rival = None if beside is None else _rival(Path(beside), subject)
    rival_name = "" if beside is None else f"{title_of(read_run(Path(beside)).method)} model"
    content = {
        "features": feature_maps(subject, Path(folder), progress),
        "landscape": loss_landscape(subject, rival, rival_name, progress),
        "grey_levels": grey_levels(subject, progress),
    }
    path = Path(folder) / ANALYSES
    text = json.dumps(content)
    try:
        replace_text(path, text)
    except OSError as error:
        raise RunError(f"Cannot write {path}: {why(error)}.") from None
    return path


def _rival(folder: Path, subject: Subject) -> Weights:
    weights = checkpoint_weights(folder)
    own = subject.state.weights
    if {n: t.shape for n, t in weights.items()} != {n: t.shape for n, t in own.items()}:
        raise RunError(f"{folder} trained another network; name a run with the same one")
    return weights
