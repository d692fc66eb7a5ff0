"""The ClientApp: what a site does when a message arrives. Each may meet a fresh process."""

import logging
import time
from collections.abc import Callable

from flwr.app import Context
from flwr.app import Message as Envelope
from flwr.clientapp import ClientApp

from feddg.deploy.site import SIMULATED, MissingContext, SimulatedSite, Site
from feddg.deploy.wire import CONTEXT, Payload
from feddg.errors import ClientError, ExperimentError, FeddgError

OWN_LOG = "the site's own log says why it cannot answer"
log = logging.getLogger("feddg")

app = ClientApp()


def _reply(
    envelope: Envelope, context: Context, work: Callable[[Site, Payload], Payload]
) -> Envelope:
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
        result = work(site, Payload.from_records(envelope.content))
    except MissingContext:
        result = Payload({"missing": CONTEXT})
    except (ClientError, ExperimentError) as error:
        result = Payload({"refusal": str(error)})
    except (FeddgError, OSError) as error:  # a full disk, a folder that may not be written to
        log.error("%s", error)
        result = Payload({"refusal": OWN_LOG})
    except Exception:
        log.exception("this message could not be answered")
        result = Payload({"refusal": OWN_LOG})
    result.fields["busy"] = time.perf_counter() - started
    return Envelope(result.to_records(), reply_to=envelope)


@app.query("register")
def register(envelope: Envelope, context: Context) -> Envelope:
    """Says who the site is, after decoding its images."""
    return _reply(envelope, context, lambda site, payload: site.register(payload))


@app.query("statistics")
def client_statistics(envelope: Envelope, context: Context) -> Envelope:
    """Describes the site for the method's setup phase."""
    return _reply(envelope, context, lambda site, payload: site.client_statistics(payload))


@app.train()
def train(envelope: Envelope, context: Context) -> Envelope:
    """Trains one round."""
    return _reply(envelope, context, lambda site, payload: site.train(payload))


@app.query("ask")
def answer(envelope: Envelope, context: Context) -> Envelope:
    """Answers a method's question about the weights that came with it."""
    return _reply(envelope, context, lambda site, payload: site.answer(payload))


@app.evaluate()
def evaluate(envelope: Envelope, context: Context) -> Envelope:
    """Measures the global model on the site's images; nothing is trained."""
    return _reply(envelope, context, lambda site, payload: site.evaluate(payload))
