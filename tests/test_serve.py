"""The server: what it answers, and that nothing sent to it does harm."""

import asyncio
import io
import re
import shutil
import socket
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from PIL import Image
from starlette.routing import Route
from starlette.testclient import TestClient

from smallvit.runs.calibration import Calibration
from smallvit.runs.prediction import Predictor, predict
from smallvit.runs.saved import save_calibration
from smallvit.serving import Limits, make_app, server
from smallvit.serving.examples import Example, from_folder
from smallvit.serving.maps import read_by_head
from tests.runs import run_command
from tests.served import BROKEN, CLASSES, IMAGE, bomb, photo, save_tiny

LIMITS = Limits(upload=200_000, memory=10**6, images=4, explained=2, pixels=10_000, queue=8, explain_queue=2, seconds=9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def predictor(folder: Path) -> Predictor:
    return Predictor(folder, largest=4)


@pytest.fixture(scope="module")
def client(predictor: Predictor) -> Iterator[TestClient]:
    with TestClient(make_app(predictor, LIMITS, [Example("one.png", "png", photo(1))])) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_is_left(client: TestClient) -> Iterator[None]:
    yield
    service = client.app.state.service  # type: ignore[attr-defined]
    assert (service.held, service.classes.taken, service.maps.taken) == (0, 0, 0)
    assert client.post("/predict", content=photo(), headers=IMAGE).status_code == 200


def test_predict_gives_the_models_probabilities(client: TestClient, predictor: Predictor):
    answer = client.post("/predict", content=photo(), headers=IMAGE)
    assert answer.status_code == 200
    (image,) = answer.json()["images"]
    expected = predictor(predictor.decode(io.BytesIO(photo()))[None])[0]
    assert [row["class"] for row in image["classes"]] == [CLASSES[i] for i in np.argsort(-expected)]
    np.testing.assert_allclose([row["probability"] for row in image["classes"]], np.sort(expected)[::-1], atol=1e-5)
    assert image["milliseconds"] > 0


def test_several_images_in_one_form(client: TestClient):
    single = [client.post("/predict", content=photo(i), headers=IMAGE).json()["images"][0] for i in range(4)]
    form = [("image", (f"{i}.png", photo(i), "image/png")) for i in range(4)]
    together = client.post("/predict?top=1", files=form).json()["images"]
    assert [image["name"] for image in together] == ["0.png", "1.png", "2.png", "3.png"]
    assert all(len(image["classes"]) == 1 for image in together)
    for alone, image in zip(single, together, strict=True):
        assert image["classes"][0]["class"] == alone["classes"][0]["class"]
        assert image["classes"][0]["probability"] == pytest.approx(alone["classes"][0]["probability"], abs=1e-5)


def test_below_the_threshold_it_is_unsure(client: TestClient, predictor: Predictor):
    form = [("image", (f"{i}.png", photo(i), "image/png")) for i in range(4)]
    plain = client.post("/predict", files=form).json()["images"]
    assert all("decision" not in image for image in plain)
    assert client.get("/model").json()["threshold"] is None
    best = sorted(image["classes"][0]["probability"] for image in plain)
    threshold = (best[1] + best[2]) / 2
    with TestClient(make_app(predictor, LIMITS, threshold=threshold)) as strict:
        decided = strict.post("/predict", files=form).json()["images"]
        first_alone = strict.post("/predict?top=1", files=form).json()["images"]
        assert strict.get("/model").json()["threshold"] == threshold
    images = np.stack([predictor.decode(io.BytesIO(photo(i))) for i in range(4)])
    expected = [each.decision for each in predict(predictor, images, threshold=threshold)]
    assert sorted(each == "unsure" for each in expected) == [False, False, True, True]
    assert [image["decision"] for image in decided] == expected == [image["decision"] for image in first_alone]
    for before, after in zip(plain, decided, strict=True):
        assert [row["class"] for row in after["classes"]] == [row["class"] for row in before["classes"]]
        assert after["decision"] in (after["classes"][0]["class"], "unsure")


def test_a_precision_chooses_the_threshold(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    calibrated = tmp_path / "model"
    shutil.copytree(folder, calibrated)
    save_calibration(calibrated, Calibration(1.5, 1000, ((0.0, 1000, 500), (0.4, 500, 490), (0.99, 10, 10))))
    thresholds = []
    monkeypatch.setattr(server.uvicorn, "Config", lambda app, **_: app)  # the real one changes how the tests log
    monkeypatch.setattr(server, "_Server", lambda app, token: thresholds.append(app.state.service.threshold) or Mock())
    server.serve(calibrated, port=0, precision=0.95)
    assert capsys.readouterr().out.startswith(
        "threshold 0.4: 500 of 1,000 validation images are kept, 98.0% of them correct"
    )
    assert thresholds == [0.4]


@pytest.mark.parametrize("kind", ["jpeg", "webp", "bmp", "gif", "tiff"])
@pytest.mark.parametrize("content_type", ["image/x", "application/octet-stream", ""])
def test_any_kind_of_image(client: TestClient, kind: str, content_type: str):
    answer = client.post("/predict", content=photo(kind=kind), headers={"Content-Type": content_type})
    assert answer.status_code == 200


def test_explain_gives_maps(client: TestClient, predictor: Predictor):
    (image,) = client.post("/explain", content=photo(size=(20, 30)), headers=IMAGE).json()["images"]
    assert np.shape(image["saliency"]) == (12, 12)
    assert len(image["layers"]) == 2
    for layer in image["layers"]:
        heads = np.array(layer["heads"])
        assert heads.shape == (2, 3, 3)
        np.testing.assert_array_equal(heads.min(axis=(1, 2)), 0)
        np.testing.assert_array_equal(heads.max(axis=(1, 2)), 1)
    head, seen = image["seen"].split(",")
    assert head == "data:image/png;base64"
    with Image.open(io.BytesIO(b64decode(seen))) as file:
        np.testing.assert_array_equal(np.asarray(file), predictor.decode(io.BytesIO(photo(size=(20, 30)))))


def test_the_class_token_is_what_reads():
    maps = np.zeros((1, 5, 5), np.float32)
    maps[0, 0] = [0.6, 0.1, 0.0, 0.0, 0.3]
    np.testing.assert_allclose(read_by_head(maps, (8, 8))[0], [[1 / 3, 0], [0, 1]], atol=1e-6)
    maps = np.tile(np.array([0.1, 0.2, 0.3, 0.4], np.float32), (1, 4, 1))
    np.testing.assert_allclose(read_by_head(maps, (8, 8))[0], [[0, 1 / 3], [2 / 3, 1]], atol=1e-6)


def test_model_health_examples_and_page(client: TestClient):
    model = client.get("/model").json()
    assert (model["name"], tuple(model["classes"])) == ("sl_vit_tiny_data", CLASSES)
    assert model["preprocess"]["size"] == [12, 12]
    assert model["limits"]["upload"] == LIMITS.upload
    assert client.get("/health").json()["status"] == "ok"
    assert client.get("/examples").json() == {"examples": ["one.png"]}
    example = client.get("/examples/0")
    assert (example.headers["content-type"], example.content) == ("image/png", photo(1))
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", page.text)


def test_headers_are_safe(client: TestClient):
    for answer in (client.get("/"), client.get("/nothing"), client.post("/predict", content=b"", headers=IMAGE)):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "server" not in answer.headers


def test_openapi_lists_every_route(client: TestClient):
    described = client.get("/openapi.json").json()
    assert described["openapi"].startswith("3.1")
    routes = [route for route in client.app.routes if isinstance(route, Route)]  # type: ignore[attr-defined]
    paths = {
        route.path.replace(":int", ""): {m.lower() for m in (route.methods or set()) - {"HEAD"}} for route in routes
    }
    assert {path: set(methods) for path, methods in described["paths"].items()} == paths
    names = described["components"]["schemas"]
    assert {name.removeprefix("#/components/schemas/") for name in refs(described)} <= set(names)


def refs(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "$ref":
                yield each
            else:
                yield from refs(each)
    elif isinstance(value, list):
        for each in value:
            yield from refs(each)


@pytest.mark.parametrize("path", ["/predict", "/explain"])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_images_are_refused(client: TestClient, path: str, name: str):
    raw = client.post(path, content=BROKEN[name], headers=IMAGE)
    form = client.post(path, files=[("a", ("good.png", photo())), ("b", (f"{name}.png", BROKEN[name]))])
    for answer in (raw, form):
        assert answer.status_code == 422
        assert "cannot be read" in answer.json()["error"]
        assert "\n" not in answer.json()["error"]
    assert form.json()["error"].startswith(f"{name}.png")


REFUSALS: dict[str, tuple[dict, int, str]] = {
    "empty": (dict(content=b"", headers=IMAGE), 422, "empty"),
    "empty file": (dict(files=[("a", ("a.png", b""))]), 422, "a.png is empty"),
    "no file": (
        dict(data={"image": "photo.jpg"}, headers={"Content-Type": "multipart/form-data; boundary=x"}),
        400,
        "cannot be read",
    ),
    "a field, no file": (
        dict(
            content=b'--x\r\nContent-Disposition: form-data; name="image"\r\n\r\nphoto.jpg\r\n--x--\r\n',
            headers={"Content-Type": "multipart/form-data; boundary=x"},
        ),
        422,
        "curl -F image=@",
    ),
    "no boundary": (dict(content=photo(), headers={"Content-Type": "multipart/form-data"}), 400, "boundary"),
    "not a form": (
        dict(content=b"abc" * 99, headers={"Content-Type": "multipart/form-data; boundary=x"}),
        400,
        "cannot be read",
    ),
    "json": (dict(json={"image": "/etc/passwd"}), 415, "application/json"),
    "text": (dict(content=b"x", headers={"Content-Type": "text/plain"}), 415, "text/plain"),
    "upload": (dict(content=bytes(LIMITS.upload + 1), headers=IMAGE), 413, "200,000 bytes"),
    "upload in pieces": (dict(content=iter([bytes(10_000)] * 100), headers=IMAGE), 413, "200,000 bytes"),
    "form": (dict(files=[("a", ("a", bytes(150_000))), ("b", ("b", bytes(150_000)))]), 413, "200,000 bytes"),
    "images": (dict(files=[("a", (f"{i}", photo())) for i in range(5)]), 413, "at most 4 images"),
    "pixels": (dict(content=photo(size=(120, 120)), headers=IMAGE), 422, "14,400 pixels, more than 10,000"),
    "bomb": (dict(content=bomb(12_000), headers=IMAGE), 422, "pixels"),
    "top": (dict(content=photo(), headers=IMAGE, params={"top": "-1"}), 400, "top='-1'"),
    "top, no number": (dict(content=photo(), headers=IMAGE, params={"top": "²"}), 400, "top="),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(client: TestClient, name: str):
    request, status, message = REFUSALS[name]
    if isinstance(request.get("content"), Iterator):
        request = {**request, "content": iter([bytes(10_000)] * 100)}
    answer = client.post("/predict", **request)
    assert (answer.status_code, message in answer.json()["error"]) == (status, True), answer.text


def test_explain_has_limits_of_its_own(client: TestClient):
    form = [("a", (f"{i}", photo(i))) for i in range(3)]
    assert len(client.post("/explain", files=form[:2]).json()["images"]) == 2
    many = client.post("/explain", files=form)
    assert (many.status_code, "at most 2 images" in many.json()["error"]) == (413, True)
    with client.app.state.service.maps.admit(LIMITS.explain_queue):  # type: ignore[attr-defined]
        full = client.post("/explain", content=photo(), headers=IMAGE)
        assert client.post("/predict", content=photo(), headers=IMAGE).status_code == 200
    assert (full.status_code, full.headers["retry-after"]) == (503, "1")


def test_an_upload_is_cut_off_early(client: TestClient):
    read = 0

    async def receive() -> dict:
        nonlocal read
        read += 10_000
        return {"type": "http.request", "body": bytes(10_000), "more_body": True}

    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    headers = [(b"content-type", b"image/png")]
    scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"", "headers": headers}
    asyncio.run(client.app(scope, receive, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 413
    assert read <= LIMITS.upload + 10_000


def test_a_client_that_goes_away_does_no_harm(client: TestClient):
    async def receive() -> dict:
        return {"type": "http.disconnect"}

    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    for kind in (b"image/png", b"multipart/form-data; boundary=x"):
        headers = [(b"content-type", kind)]
        scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"", "headers": headers}
        asyncio.run(client.app(scope, receive, send))  # type: ignore[arg-type]
    assert [message["status"] for message in sent[::2]] == [400, 400]
    assert {message["body"] for message in sent[1::2]} == {b'{"error":"the upload was interrupted"}'}
    assert client.post("/predict", content=photo(), headers=IMAGE).status_code == 200


@pytest.mark.parametrize(
    ("name", "repeated"),
    [
        ("../../etc/passwd", "../../etc/passwd"),
        ("/etc/passwd", "/etc/passwd"),
        ("a\x00b", "a%00b"),
        ("x" * 300, "x" * 200),
        ("é\u202e.png", "é\ufffd.png"),
    ],
)
def test_a_files_name_is_only_a_word(client: TestClient, name: str, repeated: str):
    answer = client.post("/predict", files=[("image", (name, photo(), "image/png"))])
    assert answer.status_code == 200
    assert answer.json()["images"][0]["name"] == repeated


@pytest.mark.parametrize(
    ("name", "status", "error"), [("x" * 5000, 400, "the form cannot be read"), ("", 422, "the form has no file")]
)
def test_a_files_name_that_is_no_word(client: TestClient, name: str, status: int, error: str):
    answer = client.post("/predict", files=[("image", (name, photo(), "image/png"))])
    assert answer.status_code == status
    assert answer.json()["error"].startswith(error)


PATHS = """
/../etc/passwd /..%2f..%2fetc/passwd /examples/../../etc/passwd /examples/%2e%2e%2fpage.html /page.html /static/x
/examples/-1 /examples/1 /examples/99999999999999999999 /predict/x
"""


@pytest.mark.parametrize("path", PATHS.split())
def test_no_path_leads_to_a_file(client: TestClient, path: str):
    answer = client.get(path)
    assert answer.status_code == 404
    assert list(answer.json()) == ["error"]


def test_wrong_method(client: TestClient):
    assert client.get("/predict").status_code == 405
    assert "error" in client.get("/predict").json()
    assert client.post("/model").status_code == 405


def test_nothing_is_compiled_after_the_start(client: TestClient):
    compiled: list[str] = []

    def listen(event: str, seconds: float, **_: str | int) -> None:
        compiled.extend([event] if "compile" in event else [])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for number in range(1, 5):
            form = [("image", (f"{i}.png", photo(i), "image/png")) for i in range(number)]
            assert client.post("/predict", files=form).status_code == 200
        assert client.post("/explain", content=photo(), headers=IMAGE).status_code == 200
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


def test_examples_of_a_folder(photos: Path, predictor: Predictor, tmp_path: Path):
    names = [example.name for example in from_folder(photos, predictor)]
    assert len(names) == 12
    assert names[:3] == ["0.png"] * 3  # one of each class first
    (tmp_path / "broken.png").write_bytes(BROKEN["truncated"])
    with pytest.raises(ValueError, match="no image that can be shown"):
        from_folder(tmp_path, predictor)


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no run": (["{tmp}"], "holds no model"),
    "a missing run": (["{tmp}/nothing"], "there is no such folder"),
    "examples": (["{model}", "--examples", "{tmp}/nothing"], "is not a folder"),
    "no examples": (["{model}", "--examples", "{tmp}"], "no image that can be shown"),
    "port": (["{model}", "--port", "70000"], "from 0 to 65535"),
    "port taken": (["{model}", "--port", "{taken}"], "Address already in use; choose another --port"),
    "host": (["{model}", "--host", "no.such.host.invalid"], "unknown host 'no.such.host.invalid'"),
    "upload": (["{model}", "--upload-mb", "0"], "upload=0 must be"),
    "not a number": (["{model}", "--upload-mb", "nan"], "upload=0 must be"),
    "seconds": (["{model}", "--seconds", "-1"], "seconds=-1"),
    "queue": (["{model}", "--queue", "3"], "no room for a request of 64"),
    "an empty token": (["{model}", "--token", ""], "the token is empty or has spaces"),  # a variable that is not set
    "a token for no header": (["{model}", "--token", "sésame"], "characters beyond ASCII"),
    "threshold": (["{model}", "--threshold", "90"], "threshold=90 must be between 0 and 1"),
    "precision": (["{model}", "--precision", "0.9"], "no stored validation scores to choose a threshold with"),
    "both": (["{model}", "--threshold", "0.9", "--precision", "0.9"], "threshold and precision both"),
}  # fmt: skip


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(
    mistake: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    args, message = MISTAKES[mistake]
    monkeypatch.setattr("smallvit.common.env.keep_compiled", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = dict(model=folder, tmp=tmp_path, taken=taken.getsockname()[1])
        assert run_command(monkeypatch, tmp_path, "serve", *(arg.format(**words) for arg in args)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("smallvit: ")
    assert message in line
