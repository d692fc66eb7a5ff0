"""A real deployment on one machine: SuperLink and SuperNodes with TLS and node authentication."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from feddg.experiment import Experiment
from feddg.flower.app_folder import write_app

BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return chosen.getsockname()[1]


def descendants(parent: int) -> list[int]:
    """Ids of the processes a process started, and those they started: Flower's leave its group."""
    children = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == parent:
                children.append(int(status.parent.name))
    return [*children, *(pid for child in children for pid in descendants(child))]


class Loopback:
    """The walk-through of docs/deploy.md, every process a child of this one."""

    def __init__(
        self,
        folder: Path,
        chosen: Experiment,
        sites: tuple[str, ...],
        *,
        images: str = "digits:{site}",
        test: str = "digits:sketch",
        **config,
    ) -> None:
        self.folder, self.sites, self.images = folder, sites, images
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.app = folder / "app"
        write_app(
            self.app,
            chosen,
            sites,
            address=self.address,
            out=folder / "runs",
            test=test,
        )
        self.path = folder / "runs" / chosen.label
        self.config = {"cache": str(folder / "coordinator"), **config}
        home = folder / "home"
        (home / ".flwr").mkdir(parents=True)
        (home / ".flwr" / "config.toml").write_text(
            f'[superlink.feddg]\naddress = "{self.address}"\n'
            f'root-certificates = "{self.app / "keys" / "ca.crt"}"\n'
        )
        self.environment = {
            **os.environ,
            "HOME": str(home),
            "FLWR_HOME": str(home / ".flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
        self.processes: dict[str, subprocess.Popen] = {}

    def call(self, *command, timeout: float = 60) -> str:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=self.app,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def spawn(self, name: str, *command) -> subprocess.Popen:
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                [str(part) for part in command],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def start_link(self) -> None:
        self.call("sh", "make_keys.sh")
        keys = self.app / "keys"
        self.spawn(
            "superlink", BIN / "flower-superlink", "--host", "127.0.0.1", "--port", self.port,
            "--enable-supernode-auth", "--ssl-ca-certfile", keys / "ca.crt",
            "--ssl-certfile", keys / "server.crt", "--ssl-keyfile", keys / "server.key",
            "--disable-runtime-dependency-installation",
        )  # fmt: skip
        self._await_link()

    def _await_link(self) -> None:
        import ssl

        context = ssl.create_default_context(cafile=str(self.app / "keys" / "ca.crt"))
        for _ in range(240):
            try:
                urllib.request.urlopen(f"https://{self.address}/health", context=context)
                return
            except (urllib.error.URLError, ConnectionError):
                assert self.processes["superlink"].poll() is None, self.log("superlink")
                time.sleep(0.5)
        raise AssertionError("the SuperLink did not start: " + self.log("superlink"))

    def make_key(self, site: str) -> Path:
        key = self.folder / f"{site}-key"
        self.call("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", key)
        return key

    def register(self, site: str) -> None:
        key = self.make_key(site)
        self.call(BIN / "flwr", "supernode", "register", f"{key}.pub", "feddg", "--name", site)

    def start_node(self, site: str) -> subprocess.Popen:
        config = {
            "site": site,
            "images": self.images.format(site=site),
            "cache": self.folder / f"cache-{site}",
            "device": "cpu",
        }
        if not self.images.startswith("digits:"):
            config["domain"] = site  # a folder root/class/*
        return self.spawn(
            site, BIN / "flower-supernode", "--superlink", self.address,
            "--root-certificates", self.app / "keys" / "ca.crt",
            "--auth-supernode-private-key", self.folder / f"{site}-key",
            "--port", free_port(),
            "--node-config", " ".join(f'{key}="{value}"' for key, value in config.items()),
        )  # fmt: skip

    def run(self) -> str:
        """Starts the run and returns its id."""
        settings = " ".join(
            f"{k}={json.dumps(v) if isinstance(v, str) else v}" for k, v in self.config.items()
        )
        shown = self.call(
            BIN / "flwr", "run", ".", "feddg", "--run-config", settings, "--format", "json"
        )
        return str(json.loads(shown)["run-id"])

    def entry(self, run: str) -> dict:
        runs = json.loads(self.call(BIN / "flwr", "list", "feddg", "--format", "json"))["runs"]
        return next(entry for entry in runs if str(entry["run-id"]) == run)

    def finish(self, run: str, seconds: float = 900) -> str:
        """Waits for the end of a run and returns its status."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            status = str(self.entry(run)["status"])
            if status.startswith("finished"):
                return status
            time.sleep(15)  # asking costs a process
        raise AssertionError("the run did not end:\n" + self.log("superlink")[-5000:])

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        """Ends a process and all it started."""
        process = self.processes.pop(name)
        for pid in [process.pid, *descendants(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, how)
        process.wait(60)

    def stop(self) -> None:
        for name in reversed(list(self.processes)):
            self.kill(name)
