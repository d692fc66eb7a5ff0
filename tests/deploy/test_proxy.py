"""The written nginx configuration, against a SuperLink's stand-in that records what reaches it."""

import base64
import http.client
import itertools
import shutil
import socket
import ssl
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra")

from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.superlink.routers.fleet import router as fleet
from flwr.supernode.fleet_http_client import FleetHttpClient
from typer.testing import CliRunner

from feddg.cli import app
from feddg.deploy.keys import let_through, public_key
from feddg.deploy.preflight import check_connection
from feddg.deploy.setup import FLEET_METHODS, REGISTERED, read_join, write_app
from feddg.experiment import Experiment
from loopback import free_port
from stand_in_proxy import StandInProxy

NGINX = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


class Recorder(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.received.append((self.path, body))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    do_GET = do_PUT = do_DELETE = do_POST

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def proxy(tmp_path_factory):
    """A deployment's folder whose proxy runs, with one site registered: port, key, received."""
    folder, port, behind = tmp_path_factory.mktemp("proxy") / "app", free_port(), free_port()
    chosen = Experiment(data="digits", clients={"number": 1})
    sites = ["ink", "chalk"]  # chalk has a key, but nobody registers it
    write_app(folder, chosen, sites, address=f"127.0.0.1:{port}", superlink_port=behind)
    for script in ("make_keys.sh", "sites/ink/make_key.sh", "sites/chalk/make_key.sh"):
        subprocess.run(["sh", folder / script], capture_output=True, check=True)
    for site in sites:
        for name in ("ca.crt", "trusted.yaml"):
            shutil.copy(folder / "keys" / name, folder / "sites" / site / name)
    pem = public_key(folder / "sites" / "ink" / "ink.pub")
    let_through(folder / REGISTERED, "ink", pem)
    upstream = ThreadingHTTPServer(("127.0.0.1", behind), Recorder)
    upstream.received = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "keys/server.crt", folder / "keys/server.key")
    upstream.socket = context.wrap_socket(upstream.socket, server_side=True)
    thread = threading.Thread(target=upstream.serve_forever, daemon=True)
    thread.start()
    command = [NGINX, "-e", "stderr", "-p", "proxy/", "-c", "nginx.conf"]
    with (folder / "nginx.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stderr=log)
    await_port(port, process, folder)
    yield folder, port, base64.b64encode(pem).decode(), upstream.received
    process.terminate()
    process.wait(30)
    upstream.shutdown()
    upstream.server_close()


def await_port(port, process, folder):
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert process.poll() is None, (folder / "nginx.log").read_text()
            time.sleep(0.05)
    raise AssertionError((folder / "nginx.log").read_text())


def ask(proxy, path, *, method="POST", key=None, body=b"x"):
    folder, port, known, _ = proxy
    context = ssl.create_default_context(cafile=folder / "keys" / "ca.crt")
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)
    headers = {FLEET_HTTP_PUBLIC_KEY_HEADER: known if key is None else key}
    try:
        connection.request(method, path, body=body, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_sites_reach_the_fleet_service(proxy):
    received = proxy[3]
    received.clear()
    for method in FLEET_METHODS:
        assert ask(proxy, f"/v1/fleet/{method}") == 200
    assert received == [(f"/v1/fleet/{method}", b"x") for method in FLEET_METHODS]


def test_a_key_in_other_case_is_another_key(proxy):
    assert ask(proxy, f"/v1/fleet/{FLEET_METHODS[0]}", key=proxy[2].swapcase()) == 401


def test_the_list_is_flowers_own_without_the_two_that_keys_make_needless():
    theirs = {route.path.removeprefix("/v1/fleet/") for route in fleet.router.routes}
    assert theirs - set(FLEET_METHODS) == {"register-node", "unregister-node"}
    assert set(FLEET_METHODS) <= theirs
    # A SuperNode calls a method of this name for each.
    for method in FLEET_METHODS:
        assert hasattr(FleetHttpClient, "".join(word.title() for word in method.split("-")))


def test_nothing_else_gets_through_not_even_for_a_site(subtests, proxy):
    for path in [
        "/",
        "/health",
        "/docs",
        "/openapi.json",
        "/v1/control/start-run",
        "/v1/control/list-nodes",
        "/v1/control/register-node",
        "/v1/control/stream-logs",
        "/v1/runtime/pull-task-input",
        "/v1/fleet",
        "/v1/fleet/",
        "/v1/fleet/register-node",
        "/v1/fleet/unregister-node",
        "/v1/fleet/get-run/x",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/get-run/..%2f..%2fcontrol/start-run",
        "/v1/fleet/get-run;/../../control/start-run",
        "/flwr.proto.Control/StartRun",
        "/flwr.proto.Fleet/GetRun",
    ]:
        with subtests.test(path=path):
            received = proxy[3]
            received.clear()
            assert ask(proxy, path) == 403
            assert received == []


def test_a_path_in_disguise_reaches_the_fleet_service_it_spells_and_nothing_else(proxy):
    received = proxy[3]
    received.clear()
    assert ask(proxy, "/v1/control/..%2ffleet/get-run") == 200
    assert [path for path, _ in received] == ["/v1/fleet/get-run"]


def test_nothing_but_posts(subtests, proxy):
    for method in ["GET", "PUT", "DELETE", "OPTIONS", "TRACE"]:
        with subtests.test(method=method):
            received = proxy[3]
            received.clear()
            assert ask(proxy, "/v1/fleet/get-run", method=method) == 405
            assert received == []


@pytest.mark.parametrize("key", ["", "A" * 300, "%", '" hospital; default 1'])
def test_a_key_that_is_not_registered_does_not_reach_flower_at_all(proxy, key):
    received = proxy[3]
    received.clear()
    for method in FLEET_METHODS:
        assert ask(proxy, f"/v1/fleet/{method}", key=key) == 401
    assert received == []


def test_a_key_that_is_not_registered_is_told_so_whatever_it_asks_with(subtests, proxy):
    for key, method in itertools.product(["", "A" * 300], ["GET", "PUT", "DELETE"]):
        with subtests.test(method=method, key=key):
            assert ask(proxy, "/v1/fleet/get-run", method=method, key=key) == 401


def registration(folder):
    checks = {check.code: check for check in check_connection(folder, read_join(folder))}
    assert checks["proxy"].severity == "note"
    return checks["registration"]


def test_the_check_tells_a_listed_key_from_another_and_from_none(proxy, tmp_path):
    sites, received = proxy[0] / "sites", proxy[3]
    received.clear()
    assert registration(sites / "ink").severity == "note"
    assert registration(sites / "chalk").severity == "error"
    assert "not on the proxy's list" in registration(sites / "chalk").text
    shutil.copytree(sites / "ink", tmp_path / "ink")
    (tmp_path / "ink" / "ink.pub").unlink()
    assert registration(tmp_path / "ink").severity == "error"
    assert received == []


@pytest.mark.parametrize(
    ("site", "code", "said"),
    [("ink", 0, "ok: ink can join"), ("chalk", 1, "error: chalk should not join yet")],
)
def test_only_a_site_whose_key_is_listed_can_join(proxy, tmp_path, site, code, said):
    command = ["deploy", "check", str(proxy[0] / "sites" / site), "--images", f"digits:{site}"]
    command += ["--cache", str(tmp_path), "--device", "cpu"]
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == code, ended.output
    assert said in ended.output


@pytest.mark.parametrize("key", [None, "", "A" * 300])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST"])
@pytest.mark.parametrize("path", ["/v1/fleet/get-run", "/v1/fleet/register-node", "/"])
def test_the_stand_in_answers_as_nginx_does(proxy, monkeypatch, path, method, key):
    monkeypatch.setattr(StandInProxy, "listed", (proxy[2],))
    with HTTPServer(("127.0.0.1", 0), StandInProxy) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        headers = {FLEET_HTTP_PUBLIC_KEY_HEADER: proxy[2] if key is None else key}
        connection.request(method, path, body=b"x", headers=headers)
        status = connection.getresponse().status
        connection.close()
        thread.join()
    assert status == ask(proxy, path, method=method, key=key)


def test_a_message_larger_than_flowers_pieces_is_refused(proxy):
    received = proxy[3]
    received.clear()
    folder, port, known, _ = proxy
    context = ssl.create_default_context(cafile=folder / "keys" / "ca.crt")
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)
    connection.putrequest("POST", "/v1/fleet/push-object")
    connection.putheader(FLEET_HTTP_PUBLIC_KEY_HEADER, known)
    connection.putheader("content-length", str(2**30))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()
    assert received == []


def test_without_tls_or_with_an_old_version_nobody_is_answered(proxy):
    folder, port, _, received = proxy
    received.clear()
    plain = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    plain.request("POST", "/v1/fleet/get-run", body=b"x")
    assert plain.getresponse().status == 400
    plain.close()
    context = ssl.create_default_context(cafile=folder / "keys" / "ca.crt")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as raw,
        pytest.raises(ssl.SSLError),
        context.wrap_socket(raw, server_hostname="127.0.0.1"),
    ):
        pass
    assert received == []


def test_what_passes_is_not_laid_down(proxy):
    folder, *_ = proxy
    assert ask(proxy, "/v1/fleet/push-object", body=b"w" * 2**22) == 200
    for name in ("body_temp", "proxy_temp"):
        assert not [file for file in (folder / "proxy" / name).rglob("*") if file.is_file()]
