"""Flower's simulation: clients of an experiment in parallel, as Ray actors.

For machines with many cores or several GPUs. Results are those of the in-process run, which is
faster if clients cannot run in parallel.
"""

import json
import os
import secrets
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.app import Message as Envelope
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from feddg.data.partition import counts_clients
from feddg.deploy import client_app
from feddg.deploy.server_app import TRAFFIC, RunFile
from feddg.deploy.site import SIMULATED
from feddg.deploy.transport import FlowerTransport, Policy
from feddg.diagnostics import Progress
from feddg.errors import FeddgError
from feddg.experiment import Experiment
from feddg.federation.federation import Federation
from feddg.methods.base import require_network_fit
from feddg.methods.composition import method_class
from feddg.records import client_name
from feddg.report import ensure_report
from feddg.runs.execute import carry_out
from feddg.runs.observer import Observer
from feddg.runs.prepare import cache_folder, in_process, load_images
from feddg.runs.reading import Run
from feddg.storage import replace_text

SIMULATION = "simulation.json"

_OFF = (
    "RAY_USAGE_STATS_ENABLED",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
)
"""Turns off what Ray does by default: usage reports, wrapping actors in uv, warnings about hidden
GPUs.
"""


class SimulatedApp(ClientApp):
    """The ClientApp of simulated nodes; a simulation started from Python has no run config."""

    def __init__(self, experiment: Experiment, cache: Path) -> None:
        super().__init__()
        self.run_config: dict[str, Any] = {
            "experiment": experiment.to_yaml(),
            "cache": str(cache),
            SIMULATED: True,
        }

    def __call__(self, message: Envelope, context: Context) -> Envelope:
        """Passes the message to the ClientApp."""
        # A copy: Flower refuses a context whose run config changed.
        whole = Context(
            context.run_id,
            context.node_id,
            context.node_config,
            context.state,
            dict(self.run_config),
        )
        return client_app.app(message, whole)


def simulate(
    experiment: Experiment,
    out: Path | str = "runs",
    *,
    observer: Observer | None = None,
    cache: Path | None = None,
    cpus: int = 1,
    gpus: float = 0.0,
) -> Run:
    """Runs an experiment in Flower's simulation; see :func:`feddg.run`.

    Args:
        experiment: what to run.
        out: parent of the run folder.
        observer: gets the progress.
        cache: folder for decoded pixels, stylized copies and the clients' memory.
        cpus: cores per client; as many clients run in parallel as fit.
        gpus: share of a GPU per client.

    Raises:
        FeddgError: Ray is missing, or the experiment cannot be run.
    """
    require_network_fit(method_class(experiment.method.name))
    if find_spec("ray") is None:
        raise FeddgError("Flower's simulation needs Ray: pip install 'flwr[simulation]'")
    for key in _OFF:
        os.environ.setdefault(key, "0")
    from flwr.simulation import run_simulation

    folder = cache_folder(cache).expanduser().resolve()
    ended: list[Run | BaseException] = []
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        # Flower ends the process on an exception here; the caller gets it instead.
        try:
            ended.append(coordinate(grid, experiment, Path(out), folder, observer))
        except BaseException as error:
            ended.append(error)

    resources: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus}
    app, nodes = SimulatedApp(experiment, folder), number_of_nodes(experiment, folder)
    try:
        run_simulation(server, app, nodes, backend_config={"client_resources": resources})
    except RuntimeError as error:
        if not ended:
            raise FeddgError(f"Flower's simulation did not start; see above ({error})") from error
    result = ended[0] if ended else FeddgError("Flower's simulation ended before the run did")
    if isinstance(result, BaseException):
        raise result
    return result


def number_of_nodes(experiment: Experiment, cache: Path) -> int:
    """Returns the number of nodes, one per client."""
    if not counts_clients(experiment.clients.partition):
        return experiment.clients.number
    return len(load_images(experiment, cache, lambda *_: None).partition)


def coordinate(
    grid: Grid, experiment: Experiment, out: Path, cache: Path, observer: Observer | None = None
) -> Run:
    """Runs an experiment over a grid of simulated nodes, or continues it."""
    path = out / experiment.label

    def prepare(experiment: Experiment, cache: Path, progress: Progress) -> Federation:
        found = in_process(experiment, cache, progress)
        table, file = found.clients.held, path / SIMULATION
        run = RunFile.read(file) or RunFile(run=f"{experiment.id}-{secrets.token_hex(6)}")
        replace_text(file, run.to_text())
        number = len(table.clients)
        transport = FlowerTransport(
            grid,
            [client_name(id) for id in range(number)],
            run.run,
            # Nobody else is waiting for nodes that load the images one after the other.
            Policy(minimum=number, wait=Policy.deadline, poll=0.02),
            found.worker.device,
            traffic=path / TRAFFIC,
        )
        transport.gather(number)
        names = {"classes": table.classes, "domains": table.domains}
        transport.fields = {key: json.dumps(value) for key, value in names.items()}
        found.transport, found.remote = transport, True
        return found

    done = carry_out(path, experiment, observer=observer, cache=cache, prepare=prepare)
    ensure_report(path)
    return done
