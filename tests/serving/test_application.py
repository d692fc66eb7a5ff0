"""The server's answers: the model's own, and a clear refusal of whatever else is sent."""

import html
import io

import numpy
import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")
pytest.importorskip("python_multipart", reason="needs the extra `serve`")
pytest.importorskip("httpx", reason="needs httpx")

from feddg.errors import AdaptationError, RunError
from feddg.prediction.classifier import RunClassifier
from feddg.prediction.predict import predict
from feddg.serving import application
from feddg.serving.server import ServeLimits, hosts_of, is_loopback, serve
from hostile_uploads import CONTENT_TYPE, hostile_uploads, multipart, png
from served_models import serving
from trained_runs import trained_run, write_images


@pytest.fixture(scope="module")
def client(finished):
    limits = ServeLimits(request_megabytes=2, waiting=3)
    with serving(RunClassifier(finished), limits) as client:
        yield client


def send(client, upload, **headers):
    headers = {"content-type": upload.content_type, **headers}
    return client.post("/predict", content=upload.body, headers=headers)


def test_answers_are_those_of_predict(finished, client, tmp_path):
    files = write_images(tmp_path, 12)
    own = list(predict(finished, tmp_path))
    sent = [("images", (file.name, file.read_bytes())) for file in files]
    reply = client.post("/predict", files=sent)
    assert reply.status_code == 200
    found = reply.json()["images"]
    assert [row["name"] for row in found] == [file.name for file in files]
    for row, expected in zip(found, own, strict=True):
        assert row["label"] == expected.label
        shares = list(row["probabilities"].values())
        assert shares == pytest.approx(expected.probabilities, abs=1e-5)
        assert row["unlike_training"] == expected.unlike_training
        assert row["energy"] == pytest.approx(expected.energy, abs=1e-3)
        assert row["reason"] is None


def test_what_is_hostile_gets_a_clear_refusal(subtests, client):
    for upload in hostile_uploads():
        with subtests.test(upload=upload):
            reply = send(client, upload)
            assert reply.status_code in upload.statuses
            said = reply.json()["detail"]
            assert 5 < len(said) < 300
            assert "Traceback" not in said
            assert client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("../../etc/passwd", "../../etc/passwd"),
        ("/etc/passwd", "/etc/passwd"),
        (r"..\\..\\boot.ini", r"..\..\boot.ini"),
        ("a" * 300 + ".png", "a" * 251 + ".png"),
        ("\x1b[2Ja.png", r"\x1b[2Ja.png"),
        ("<script>.png", "<script>.png"),
    ],
)
def test_a_name_is_given_back_and_nothing_else_is_done_with_it(client, name, shown):
    body = multipart((name, png()))
    reply = client.post("/predict", content=body, headers={"content-type": CONTENT_TYPE})
    assert reply.headers["content-type"] == "application/json"
    (row,) = reply.json()["images"]
    assert (row["name"], row["reason"]) == (shown, None)


@pytest.mark.parametrize("name", ["at 1.30.00\u202fPM.png", "\u5199\u771f\u3000.png", "12:30.png"])
def test_names_that_files_have_elsewhere_are_taken(client, tmp_path, name):
    (file,) = write_images(tmp_path, 1)
    reply = client.post("/predict", files=[("images", (name, file.read_bytes()))])
    assert reply.json()["images"][0]["name"] == name


def test_a_bad_file_among_good_ones_says_why(client):
    body = multipart(("a.png", png()), ("b.png", b"no image"), ("c.png", png(seed=1)))
    reply = client.post(
        "/predict", content=body, headers={"content-type": hostile_uploads()[0].content_type}
    )
    assert reply.status_code == 200
    reasons = [row["reason"] for row in reply.json()["images"]]
    assert reasons == [None, "not an image in a known format", None]


def test_a_dicom_file_is_answered_and_a_damaged_one_without_its_tags(client, tmp_path):
    pytest.importorskip("pydicom", reason="pydicom is an optional extra")
    from dicoms import SECRETS, dicom

    path = dicom(tmp_path / "a.dcm", numpy.full((20, 20), 700, numpy.uint16), WindowCenter="700")
    whole = path.read_bytes()
    sent = [("a.dcm", whole), ("torn.dcm", whole[:-90]), ("frames.dcm", whole[: len(whole) // 4])]
    reply = client.post("/predict", files=[("images", file) for file in sent])
    assert reply.status_code == 200
    good, *bad = reply.json()["images"]
    assert good["reason"] is None
    assert ["DICOM" in row["reason"] for row in bad] == [True, True]
    assert not [secret for secret in SECRETS if secret in reply.text]


def test_a_large_body_is_refused_said_or_unsaid(client):
    whole = multipart(("a.png", bytes(3 * 2**20)))
    reply = client.post("/predict", content=whole, headers={"content-type": CONTENT_TYPE})
    assert reply.status_code == 413

    def unsaid():
        yield multipart(("a.png", bytes(2**20)))[: 2**20]
        for _ in range(3):
            yield bytes(2**20)

    upload = hostile_uploads()[0]
    reply = client.post("/predict", content=unsaid(), headers={"content-type": upload.content_type})
    assert reply.status_code == 413
    assert "2 MB" in reply.json()["detail"]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "a@b:c:d"])
def test_other_names_are_refused(client, host):
    """Else a web site could point its own name here, and read answers in its visitor's browser."""
    for method, path in (("GET", "/model"), ("GET", "/"), ("POST", "/predict")):
        assert client.request(method, path, headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9000", "127.0.0.1", "[::1]:8000"])
def test_names_of_this_machine_are_taken(client, host):
    assert client.get("/health", headers={"host": host}).status_code == 200


def test_pages_of_other_web_sites_cannot_have_images_labelled(subtests, client):
    for headers, status in [
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:9000"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"host": "localhost:80", "origin": "http://localhost:80"}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({}, 200),
    ]:
        with subtests.test(headers=headers, status=status):
            reply = client.post("/predict", files={"images": ("a.png", png())}, headers=headers)
            assert reply.status_code == status
            assert "access-control-allow-origin" not in reply.headers


def test_every_answer_forbids_what_the_page_does_not_need(client):
    for path in ("/", "/static/page.js", "/static/page.css", "/model", "/nowhere"):
        headers = client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
    assert client.get("/docs").status_code == 404
    assert client.get("/predict").status_code == 405


def test_the_page_asks_nobody_else(client):
    page = client.get("/").text
    assert "http://" not in page
    assert "https://" not in page
    assert "<script>" not in page
    assert "style=" not in page
    assert "<span>FedAvg</span>" in page


def test_the_model_says_what_it_is(client, finished):
    found = client.get("/model").json()
    assert found["class_names"] == [str(digit) for digit in range(10)]
    assert found["method"] == "fedavg"
    assert found["weights"] == RunClassifier(finished).weights
    assert found["limits"]["images"] == 32
    assert ".png" in found["formats"]
    assert "a domain nobody trained on (sketch)" in found["result"]
    schema = client.get("/openapi.json").json()
    assert "multipart/form-data" in schema["paths"]["/predict"]["post"]["requestBody"]["content"]


def test_nothing_is_laid_down_on_disk(client, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("a file was written")

    monkeypatch.setattr("tempfile.SpooledTemporaryFile.rollover", forbidden)
    large = io.BytesIO(png(800)).getvalue()
    assert 2**20 < len(large) < 2 * 2**20
    assert client.post("/predict", files={"images": ("a.png", large)}).status_code == 200


def test_a_model_that_fails_does_not_end_the_server(client, monkeypatch):
    def failing(self, pixels):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(RunClassifier, "answer", failing)
    reply = client.post("/predict", files={"images": ("a.png", png())})
    assert reply.status_code == 500
    assert reply.json() == {"detail": application.FAILED}
    monkeypatch.undo()
    assert client.post("/predict", files={"images": ("a.png", png())}).status_code == 200


def test_a_meaningless_model_says_so_everywhere(tmp_path):
    train = {"rounds": 1, "local_steps": 1, "lr": 1e-9}
    run = trained_run(tmp_path, tmp_path / "cache", train=train)
    with serving(RunClassifier(run)) as client:
        assert "Do not rely on this model" in client.get("/").text
        (said,) = client.get("/model").json()["diagnostics"]
        assert said["code"] == "no-better-than-majority-class"
        assert said["severity"] == "warning"
        assert "always answering the most frequent class" in said["text"]
        assert said["text"] in html.unescape(client.get("/").text)
        reply = client.post("/predict", files={"images": ("a.png", png())})
        assert reply.json()["diagnostics"] == [said]
    with pytest.raises(RunError, match="Its labels mean nothing"):
        serve(run, port=0, strict=True)


def test_what_may_not_be_served_is_refused(finished):
    with pytest.raises(RunError, match="--allow-network"):
        serve(finished, host="0.0.0.0", port=0)
    with pytest.raises(AdaptationError, match="remembers the images"):
        serve(finished, adapt="tent", port=0)
    with pytest.raises(RunError, match="cannot listen"):
        serve(finished, host="192.0.2.1", port=0, allow_network=True)


def test_loopback_is_known():
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost", "127.8.8.8")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.2", "example.org")))
    assert "0.0.0.0" not in hosts_of("0.0.0.0", ["model.hospital.org"])
    assert "model.hospital.org" in hosts_of("0.0.0.0", ["model.hospital.org"])


def test_images_of_a_request_are_answered_together(finished, monkeypatch):
    sizes, answer = [], RunClassifier.answer

    def counted(self, pixels):
        sizes.append(len(pixels))
        return answer(self, pixels)

    monkeypatch.setattr(RunClassifier, "answer", counted)
    monkeypatch.setattr(application, "MOST_TOGETHER", 8)
    with serving(RunClassifier(finished)) as client:
        files = [("images", (f"{i}.png", png(seed=i))) for i in range(20)]
        found = client.post("/predict", files=files).json()["images"]
    alone = [row["label"] for row in found]
    assert sizes == [8, 8, 4]
    with serving(RunClassifier(finished)) as client:
        one = [client.post("/predict", files=[file]).json()["images"][0]["label"] for file in files]
    assert one == alone
