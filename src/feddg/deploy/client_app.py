"""The ClientApp: what a site does when a message arrives. Each may meet a fresh process."""

import logging
import time
from collections.abc import Callable

from flwr.app import Context
from flwr.app import Message as Envelope
from flwr.clientapp import ClientApp

from feddg.deploy.site import SIMULATED, MissingContext, SimulatedSite, Site
from feddg.deploy.wire import BUSY, Order, Parcel, update_parcel
from feddg.errors import ClientError, ExperimentError, FeddgError
from feddg.federation.local_training import answer, client_statistics, train
from feddg.messages import Message
from feddg.records import EVALUATION_ROWS

Work = Callable[[Site, Parcel], Parcel]

OWN_LOG = "the site's own log says why it cannot answer"
log = logging.getLogger("feddg")

app = ClientApp()


def _reply(envelope: Envelope, context: Context, work: Work) -> Envelope:
    """Answers with the work's result, or with the one sentence that says why there is none.

    What went wrong with a site's own files stands in the site's own log: their names, and whatever
    else an error might quote, never leave it.
    """
    started = time.perf_counter()
    try:
        # What a SuperNode's own config says is never overruled by what is sent to it.
        simulated = SIMULATED in context.run_config and "site" not in context.node_config
        kind = SimulatedSite if simulated else Site
        site = kind(context.node_config, context.run_config)
        result = work(site, Parcel.from_records(envelope.content))
    except MissingContext:
        result = Parcel({"missing": "context"})
    except (ClientError, ExperimentError) as error:
        result = Parcel({"refusal": str(error)})
    except (FeddgError, OSError) as error:  # a full disk, a folder that may not be written to
        log.error("%s", error)
        result = Parcel({"refusal": OWN_LOG})
    except Exception:
        log.exception("this message could not be answered")
        result = Parcel({"refusal": OWN_LOG})
    result.fields[BUSY] = time.perf_counter() - started
    return Envelope(result.to_records(), reply_to=envelope)


@app.query("introduce")
def introduce_site(envelope: Envelope, context: Context) -> Envelope:
    """Says who the site is, after decoding its images."""
    return _reply(envelope, context, lambda site, parcel: site.introduce(parcel))


@app.query("statistics")
def site_statistics(envelope: Envelope, context: Context) -> Envelope:
    """Describes the site for the method's setup phase."""
    return _reply(envelope, context, _describe)


@app.train()
def train_site(envelope: Envelope, context: Context) -> Envelope:
    """Trains one round."""
    return _reply(envelope, context, _train)


@app.query("ask")
def ask_site(envelope: Envelope, context: Context) -> Envelope:
    """Answers a method's question about the weights that came with it."""
    return _reply(envelope, context, _ask)


@app.evaluate()
def evaluate_site(envelope: Envelope, context: Context) -> Envelope:
    """Measures the global model on the site's images; nothing is trained."""
    return _reply(envelope, context, _evaluate)


def _describe(site: Site, parcel: Parcel) -> Parcel:
    turn = site.turn(parcel)
    description = client_statistics(turn.client, turn.method, turn.client.received)
    turn.keep()
    return Parcel(parts={"reply": description})


def _train(site: Site, parcel: Parcel) -> Parcel:
    turn = site.turn(parcel)
    update = train(turn.client, turn.method, turn.defences)
    turn.keep()
    return update_parcel(update)


def _ask(site: Site, parcel: Parcel) -> Parcel:
    turn = site.turn(parcel, after_training=True)
    question = Order.read(parcel).question
    reply = answer(turn.client, turn.method, question, turn.client.extras, turn.defences)
    turn.keep()
    return Parcel(parts={"reply": reply})


def _evaluate(site: Site, parcel: Parcel) -> Parcel:
    round = Order.read(parcel).round
    rows = [score.row(round, with_confusion=True) for score in site.scores(parcel)]
    return Parcel(parts={"scores": Message({}, {"scores": EVALUATION_ROWS.to_text(rows)})})
