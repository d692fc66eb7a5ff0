"""The model card in a run folder: written once the run is complete, kept as its reader edits it."""

import logging
from pathlib import Path

from feddg.errors import RunError
from feddg.runs.model import load_trained
from feddg.storage import replace_text
from feddg.studies.export import metadata_of
from feddg.studies.model_card import model_card

MODEL_CARD = "model_card.md"
log = logging.getLogger("feddg")


def ensure_card(run: Path) -> Path | None:
    """Writes a complete run's ``model_card.md`` unless it has one; returns it.

    A card is there to be filled in (terms of the images, intended use), so it is never replaced.
    None where there is nothing to describe: no model that all clients share. What keeps a card from
    being written is logged; it is no reason for a run to fail.
    """
    card = run / MODEL_CARD
    if card.is_file():
        return card
    try:
        replace_text(card, model_card(run, metadata_of(run, load_trained(run), "run")))
    except (RunError, OSError) as error:
        log.info("no model card: %s", error)
        return None
    return card
