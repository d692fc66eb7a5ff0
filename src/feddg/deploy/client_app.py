"""The ClientApp: how a site answers messages. Each message may start a new process."""

import logging
import time
from collections.abc import Callable

from flwr.app import Context
from flwr.app import Message as Envelope
from flwr.clientapp import ClientApp

from feddg.deploy.site import MissingContext, Site, site_of
from feddg.deploy.wire import CONTEXT, Payload
from feddg.errors import ClientError, Diverged, ExperimentError, FeddgError

OWN_LOG = "the site's own log says why it cannot answer"
log = logging.getLogger("feddg")

app = ClientApp()


def _reply(
    envelope: Envelope, context: Context, work: Callable[[Site, Payload], Payload]
) -> Envelope:
    """Replies with the result of ``work``, or with a sentence on why there is none.

    Errors about a site's own files go to the site's log only: file names, and anything else an
    error might quote, never leave the site.
    """
    started = time.perf_counter()
    try:
        site = site_of(context.node_config, context.run_config)
        result = work(site, Payload.from_records(envelope.content))
    except MissingContext:
        result = Payload({"missing": CONTEXT})
    except (ClientError, ExperimentError) as error:
        result = Payload({"refusal": str(error), "diverged": isinstance(error, Diverged)})
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
    """Decodes the site's images and replies with its name and contents."""
    return _reply(envelope, context, lambda site, payload: site.register(payload))


@app.query("statistics")
def client_statistics(envelope: Envelope, context: Context) -> Envelope:
    """Replies with the site's statistics for the method's setup."""
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
    """Evaluates the global model on the site's images, without training."""
    return _reply(envelope, context, lambda site, payload: site.evaluate(payload))
