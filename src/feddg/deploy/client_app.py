"""The ClientApp: how a site answers messages. Each message may start a new process."""

import logging
import time
from collections.abc import Callable

from flwr.app import Context
from flwr.app import Message as Envelope
from flwr.clientapp import ClientApp

from feddg.deploy.site import MissingContext, site_of
from feddg.deploy.wire import CONTEXT, Payload
from feddg.errors import ClientError, Diverged, ExperimentError, FeddgError

OWN_LOG = "the site's own log says why it cannot answer"
log = logging.getLogger("feddg")


def _replying(task: str) -> Callable[[Envelope, Context], Envelope]:
    """Returns what replies with the result of a task of the site, or a sentence on why it has none.

    Errors about a site's own files go to the site's log only: file names, and anything else an
    error might quote, never leave the site.
    """

    def reply(envelope: Envelope, context: Context) -> Envelope:
        started = time.perf_counter()
        try:
            site = site_of(context.node_config, context.run_config)
            result: Payload = getattr(site, task)(Payload.from_records(envelope.content))
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

    return reply


app = ClientApp()
app.query("register")(_replying("register"))
app.query("statistics")(_replying("client_statistics"))
app.query("ask")(_replying("answer"))
app.train()(_replying("train"))
app.evaluate()(_replying("evaluate"))
