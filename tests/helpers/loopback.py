"""A real deployment on one machine: SuperLink and SuperNodes with TLS and node authentication."""

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from feddg.deploy.setup import write_app
from feddg.experiment import Experiment

BIN = Path(sys.executable).parent
NGINX = (
    *(shutil.which("nginx") or "/usr/sbin/nginx", "-e", "stderr", "-p", "proxy/"),
    *("-c", "nginx.conf"),
)


def has_nginx() -> bool:
    return Path(NGINX[0]).is_file()


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


class Processes:
    """Flower's processes on this machine, every one a child of this one; ended with their block."""

    def __init__(self, folder: Path, cwd: Path, flower_home: Path, **variables: str) -> None:
        self.folder, self.cwd = folder, cwd
        home = folder / "home"
        home.mkdir()
        self.environment = {
            **os.environ,
            "HOME": str(home),
            "FLWR_HOME": str(flower_home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPERGRID_API_URL": "http://127.0.0.1:9",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            **variables,
        }
        self.processes: dict[str, subprocess.Popen] = {}

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self.stop()

    def attempt(
        self, *command, environment: dict[str, str] | None = None, timeout: float = 180
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(part) for part in command],
            cwd=self.cwd,
            env=environment or self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def call(self, *command, timeout: float = 180) -> str:
        done = self.attempt(*command, timeout=timeout)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def spawn(self, name: str, *command, cwd: Path | None = None) -> subprocess.Popen:
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                [str(part) for part in command],
                cwd=cwd or self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def await_link(self, ask: Callable[[], object]) -> None:
        """Waits until the SuperLink answers a question."""
        for _ in range(240):
            try:
                ask()
                return
            except OSError:
                assert self.processes["superlink"].poll() is None, self.log("superlink")
                time.sleep(0.5)
        raise AssertionError("the SuperLink did not start: " + self.log("superlink"))

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


class Loopback(Processes):
    """The walk-through of docs/deploy.md, every process a child of this one."""

    def __init__(
        self,
        folder: Path,
        chosen: Experiment,
        sites: tuple[str, ...],
        *,
        evaluation_sites: tuple[str, ...] = (),
        images: str | dict[str, str] = "digits:{site}",
        test: str = "digits:sketch",
        **config,
    ) -> None:
        self.app = folder / "app"
        super().__init__(folder, self.app, self.app / "flower-home")
        self.sites, self.images = sites, images
        port, behind = free_port(), free_port()
        self.address, self.superlink = f"127.0.0.1:{port}", f"127.0.0.1:{behind}"
        write_app(
            self.app,
            chosen,
            sites,
            address=self.address,
            superlink_port=behind,
            out=folder / "runs",
            test=test,
            evaluation_sites=evaluation_sites,
        )
        self.path = folder / "runs" / chosen.label
        self.configure(cache=str(folder / "coordinator"), **config)

    def configure(self, **config) -> None:
        """Changes the app's config, as a coordinator edits it."""
        file = self.app / "pyproject.toml"
        text = file.read_text()
        for key, value in config.items():
            line = f"{key} = {json.dumps(value)}"
            text, found = re.subn(rf"(?m)^{key} = \S+", lambda match: line, text)
            assert found == 1, key
        file.write_text(text)

    def start_link(self) -> None:
        """Starts the SuperLink, and before it the proxy."""
        self.call("sh", "make_keys.sh")
        if "proxy" not in self.processes:
            self.spawn("proxy", *NGINX, cwd=self.app)
        keys = self.app / "keys"
        host, port = self.superlink.split(":")
        self.spawn(
            "superlink", BIN / "flower-superlink", "--host", host, "--port", port,
            "--database", "superlink.db", "--enable-supernode-auth",
            "--ssl-ca-certfile", keys / "ca.crt", "--ssl-certfile", keys / "server.crt",
            "--ssl-keyfile", keys / "server.key", "--disable-runtime-dependency-installation",
            cwd=self.app,
        )  # fmt: skip
        self.await_link(lambda: self.ask(self.superlink, "/health"))

    def ask(self, address: str, path: str) -> int:
        """Returns the HTTP status of a path, asked by somebody who has the public ca.crt alone."""
        context = ssl.create_default_context(cafile=str(self.app / "keys" / "ca.crt"))
        try:
            with urllib.request.urlopen(f"https://{address}{path}", context=context) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    def make_key(self, site: str) -> Path:
        key = self.folder / f"{site}-key"
        self.call("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", key)
        return key

    def feddg(self, *arguments) -> str:
        return self.call(sys.executable, "-m", "feddg", *arguments)

    def register(self, site: str) -> None:
        key = self.make_key(site)
        self.feddg("deploy", "register", ".", site, f"{key}.pub")
        self.reload()

    def reload(self) -> None:
        """Has the proxy read the list of registered keys again."""
        self.call(*NGINX, "-s", "reload")

    def let_through(self, path: str) -> int:
        """Returns how often the proxy let a call of the Fleet service through."""
        return (self.app / "proxy" / "access.log").read_text().count(f'"POST {path} HTTP/1.1" 200')

    def start_node(
        self, name: str, *, link: str = "", trust: bool = True, **more
    ) -> subprocess.Popen:
        """Starts a SuperNode.

        Args:
            name: whose key it has, and what it calls itself.
            link: where it connects; by default to the proxy.
            trust: whether it runs the coordinator's apps alone, as documented, or any.
            more: changes of its config.
        """
        images = self.images if isinstance(self.images, str) else self.images.get(name, "")
        config = {
            "site": name,
            "images": images.format(site=name),
            "cache": self.folder / f"cache-{name}",
            "device": "cpu",
            **more,
        }
        if not str(config["images"]).startswith("digits:"):
            config["domain"] = name  # a folder root/class/*
        keys = self.app / "keys"
        return self.spawn(
            name, BIN / "flower-supernode", "--superlink", link or self.address,
            "--root-certificates", keys / "ca.crt",
            *(("--trusted-entities", keys / "trusted.yaml") if trust else ()),
            "--auth-supernode-private-key", self.folder / f"{name}-key",
            "--port", free_port(),
            "--node-config", " ".join(f'{key}="{value}"' for key, value in config.items()),
        )  # fmt: skip

    def serve_node(self, site: str, seconds: float = 180) -> None:
        """Starts a SuperNode, and again until it is let in, as its service does."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            before = len(self.log(site)) if (self.folder / f"{site}.log").exists() else 0
            process = self.start_node(site)
            while process.poll() is None:
                if "SuperNode ID" in self.log(site)[before:]:
                    return
                time.sleep(0.5)
            time.sleep(10)
        raise AssertionError(f"{site} was not let in:\n" + self.log(site)[-3000:])

    def run(self) -> str:
        """Signs the app, starts the run and returns its id."""
        self.feddg("deploy", "sign", ".")
        shown = self.feddg("deploy", "run", ".")
        return re.search(r"^run (\d+);", shown, re.MULTILINE).group(1)

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
