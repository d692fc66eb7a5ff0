"""What several tests need."""

import gc
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import numpy
import pytest
from filelock import FileLock

from feddg.data import decoded
from feddg.data.data_set import DATA_SETS
from feddg.data.pixels import PixelStore
from feddg.methods.base import METHODS
from feddg.storage import hash_of
from hub_server import Hub, serving_hub
from run_folders import FolderMaker
from trained_runs import SHORT, trained_run

# Tests start many processes; where compiled modules are not kept, each start costs many seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# No timed assertions; `--hypothesis-profile thorough` looks at ten times as many examples.
hypothesis.settings.register_profile("feddg", deadline=None, max_examples=50)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=500)
hypothesis.settings.load_profile("feddg")


def pytest_xdist_auto_num_workers() -> int:
    """A worker more than there are cores: a sixth of the time some test waits for a process."""
    return 1 + (os.cpu_count() or 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What is imported stays: looking it through for garbage took a tenth of the tests' time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(20_000)


PASSED = pytest.StashKey[bool]()
CACHE = "cache"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    item.stash[PASSED] = item.stash.get(PASSED, True) and not report.failed
    return report


@pytest.fixture
def tmp_path(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder of the test's own, emptied once it passed: runs hold whole networks.

    The folder itself stays, so that no later test is given the same path: what is remembered by
    path, as hashes are, would be mistaken for its own.
    """
    yield tmp_path
    if request.node.stash.get(PASSED, False):
        for entry in tmp_path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with PACS, backbone weights and codec images; tests that need it skip without it.

    ``FEDDG_SHARED_DATA`` names it; by default it is looked for beside the checkout.
    """
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("FEDDG_SHARED_DATA", default))
    if not (folder / "pacs").is_dir():
        pytest.skip(f"needs the data folder {folder} (set FEDDG_SHARED_DATA)")
    return folder


@pytest.fixture
def device() -> Iterator[str]:
    """A device that is not the CPU."""
    from feddg.testing.device import second_device
    from feddg.testing.methods import HAS_SECOND_DEVICE

    if not HAS_SECOND_DEVICE:
        pytest.skip("this version of PyTorch has no back ends that are written in Python")
    with second_device() as name:
        yield name


@pytest.fixture
def folder_maker(tmp_path: Path) -> Callable[..., FolderMaker]:
    """Makes a ``FolderMaker`` for a folder below ``tmp_path``: ``folder_maker("a", rounds=3)``."""
    return lambda name="run", **fields: FolderMaker(tmp_path / name, **fields)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hugging Face hub on this machine, asked in place of the real one; nobody is logged in."""
    from huggingface_hub import constants, file_download

    from feddg.data import download

    with serving_hub() as served:
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "127.0.0.1")
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", served.address)
        template = served.address + "/{repo_id}/resolve/{revision}/{filename}"
        for module in (constants, file_download):  # older versions have a copy there
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.setattr(download, "PAUSE", 0.0)
        yield served


# What several files of tests look at is computed once, by whichever worker comes first.


@pytest.fixture(scope="session")
def among_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of these tests share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "among_workers"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def unsynced() -> Iterator[None]:
    """Nothing waits for the disk: tests kill processes, not machines. A run waits 75 times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def made_smaller_once() -> Iterator[None]:
    """Digits are made smaller once: that takes a quarter of a small run."""
    smaller: dict[tuple[str, int, str], numpy.ndarray] = {}
    rendered = decoded._rendered

    def rendered_once(images: numpy.ndarray, size: int, resize: decoded.Resize) -> PixelStore:
        if images.ndim == 4 and images.shape[1:3] != (size, size):
            key = hash_of(images.shape, images), size, resize
            if key not in smaller:
                found = rendered(images, size, resize).gather(range(len(images)))
                smaller[key] = found.permute(0, 2, 3, 1).numpy()
            images = smaller[key]
        return rendered(images, size, resize)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoded, "_rendered", rendered_once)
        yield


@pytest.fixture(scope="session")
def cache(among_workers: Path) -> Path:
    """A cache of the runs below."""
    (folder := among_workers / CACHE).mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def train_once(
    tmp_path_factory: pytest.TempPathFactory, among_workers: Path, cache: Path
) -> Callable[..., Path]:
    """Gives a worker its own copy of a run that is trained once: ``train_once("ridge", seed=1)``.

    Arguments are those of ``trained_run``; the same ones give the same folder again.
    """
    copies: dict[str, Path] = {}

    def run(method: str = "fedavg", **changes: object) -> Path:
        key = hash_of([method, sorted(changes.items())])
        if key not in copies:
            with FileLock(among_workers / f"{key}.lock"):
                if not (done := among_workers / f"{key}.done").is_file():
                    done.write_text(str(trained_run(among_workers / key, cache, method, **changes)))
            of = Path(done.read_text())
            copies[key] = tmp_path_factory.mktemp("runs") / of.name
            shutil.copytree(of, copies[key])
        return copies[key]

    return run


@pytest.fixture(scope="session")
def finished(train_once: Callable[..., Path]) -> Path:
    """FedAvg on digits, good enough for an out-of-distribution score."""
    return train_once()


@pytest.fixture(scope="session")
def run_of(train_once: Callable[..., Path], finished: Path) -> Callable[[str], Path]:
    """Gives a run of a method, trained once; but for FedAvg a short one."""
    return lambda method: finished if method == "fedavg" else train_once(method, **SHORT)


@pytest.fixture(scope="session")
def meaningless(train_once: Callable[..., Path]) -> Path:
    """A run that has learnt nothing."""
    train = {"rounds": 1, "local_steps": 1, "batch_size": 8, "lr": 1e-9, "augmentation": "none"}
    return train_once(train=train)


@pytest.fixture
def runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons carry their runs out in this process, not in one each, which costs seconds."""
    from feddg.comparison.pool import LocalLauncher, run_here

    monkeypatch.setattr(
        LocalLauncher, "run", lambda self, tasks: run_here(tasks, self.cache, self.watcher)
    )


@dataclass
class Opened:
    """What a browser made of a page: its elements, errors, requests, and all it did."""

    page: str
    errors: list[str]
    requests: list[str]
    log: str


@pytest.fixture
def open_in_browser(tmp_path: Path) -> Callable[[Path], Opened]:
    """Opens a page in headless Chromium; skips where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    browser = next((path for path in map(shutil.which, names) if path), None)
    if browser is None:
        pytest.skip("needs Chromium or Chrome to open the page")

    def opened(page: Path) -> Opened:
        net_log = tmp_path / "net.json"
        command = [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update"),
            *("--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND"),
            *("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"),
            *(f"--log-net-log={net_log}", "--virtual-time-budget=10000", "--dump-dom"),
        ]
        done = subprocess.run(
            [*command, page.as_uri()], capture_output=True, text=True, timeout=300, check=True
        )
        errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        log = net_log.read_text()
        return Opened(done.stdout, errors, _requested(log), log)

    return opened


def _requested(net_log: str) -> list[str]:
    """Addresses the browser asked for on behalf of a page; its own services are not ours."""
    text = net_log.rstrip().rstrip(",")
    log = json.loads(text if text.endswith("}") else text + "]}")
    parameters = [event.get("params") or {} for event in log["events"]]
    return [
        entry["url"]
        for entry in parameters
        if str(entry.get("url", "")).startswith("http")
        and "file://" in str(entry.get("network_isolation_key"))
    ]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What is registered meanwhile is forgotten again, and entry points are looked for anew."""
    for registry in (DATA_SETS, METHODS):
        len(registry)
        for name in ("_found", "_broken", "_aliases"):
            monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
        monkeypatch.setattr(registry, "_complete", False)
    return monkeypatch
