"""The served page in a real browser: images are dropped on it, and answers appear."""

import shutil

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")
pytest.importorskip("python_multipart", reason="needs the extra `serve`")
pytest.importorskip("httpx", reason="needs httpx")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")

from feddg.prediction.classifier import RunClassifier
from feddg.prediction.predict import predict
from served_models import serving
from trained_runs import write_images

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
DROP = """(files) => {
  const given = new DataTransfer();
  for (const [name, content] of files) {
    const bytes = Uint8Array.from(atob(content), (c) => c.charCodeAt(0));
    given.items.add(new File([bytes], name));
  }
  const frame = document.getElementById("drop");
  for (const kind of ["dragenter", "dragover", "drop"]) {
    const how = { dataTransfer: given, bubbles: true, cancelable: true };
    frame.dispatchEvent(new DragEvent(kind, how));
  }
}"""


@pytest.fixture(scope="module")
def browser():
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        pytest.skip("needs Chromium or Chrome")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=found, args=arguments)
        yield opened
        opened.close()


@pytest.mark.parametrize("width", [1280, 400])
def test_images_that_are_chosen_are_answered_on_the_page(finished, browser, tmp_path, width):
    files = write_images(tmp_path / "images", 3)
    own = list(predict(finished, tmp_path / "images"))
    (tmp_path / "broken.png").write_bytes(b"no image")
    errors, requests = [], []
    with serving(RunClassifier(finished)) as client:
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(str(client.base_url))
        assert page.locator("h1").inner_text() == "Label images"
        page.locator("#files").set_input_files([*files, tmp_path / "broken.png"])
        page.get_by_text("4 answered").wait_for()
        rows = page.locator("#results li").all_inner_texts()
        wide = page.evaluate("document.documentElement.scrollWidth")
        page.close()
    assert len(rows) == 4
    for row, expected in zip(rows, own):
        assert f"\n{expected.label} {100 * expected.confidence:.1f} %" in row
        light = (
            "unlike the training images" if expected.unlike_training else "like the training images"
        )
        assert light in row
    assert "Cannot be used: not an image in a known format." in rows[3]
    assert wide <= width, "the page is wider than the screen"
    # What a broken image is told is no fault of the page's; everything else would be.
    assert all("415" in error for error in errors), errors
    assert {url.split("/")[2] for url in requests if url.startswith("http")} == {
        f"127.0.0.1:{client.base_url.port}"
    }


def test_images_that_are_dropped_are_answered_and_the_page_stays(finished, browser, tmp_path):
    import base64

    files = write_images(tmp_path, 2)
    given = [[file.name, base64.b64encode(file.read_bytes()).decode()] for file in files]
    with serving(RunClassifier(finished)) as client:
        page = browser.new_page()
        page.goto(str(client.base_url))
        page.evaluate(DROP, given)
        page.get_by_text("2 answered").wait_for()
        assert page.locator("#results .label").count() == 2
        page.close()
