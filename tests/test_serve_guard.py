"""The server lets nobody lock others out, and answers only those who may ask."""

import io
import signal
import socket
import struct
import threading
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import uvicorn
from PIL import Image
from starlette.testclient import TestClient

from smallvit import __main__
from smallvit.data import decode
from smallvit.runs.prediction import Predictor
from smallvit.serving import Limits, make_app
from smallvit.serving.connections import limited
from smallvit.serving.guard import LOOPBACK
from smallvit.serving.server import _is_loopback, _Server
from tests.runs import required
from tests.served import IMAGE, photo, tiny_predictor


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return tiny_predictor(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def client(predictor: Predictor) -> Iterator[TestClient]:
    with TestClient(make_app(predictor, hosts=LOOPBACK), base_url="http://localhost:8000") as client:
        yield client


@pytest.fixture(scope="module")
def closed(predictor: Predictor) -> Iterator[TestClient]:
    app = make_app(predictor, token="right")
    with TestClient(app, base_url="http://10.0.0.7", follow_redirects=False) as client:
        yield client


def test_only_its_own_names_are_answered(client: TestClient):
    for host, status in (
        ("localhost", 200),
        ("127.0.0.1:9", 200),
        ("[::1]:8000", 200),
        ("evil.example", 421),
        ("", 421),
    ):
        assert client.get("/model", headers={"Host": host}).status_code == status, host
    assert client.get("/ready", headers={"Host": "10.1.2.3"}).status_code == 200  # a probe's


def test_pages_of_other_sites_do_not_ask(client: TestClient):
    def status(method: str, path: str, **headers: str) -> int:
        return client.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()}).status_code

    assert status("POST", "/predict", Sec_Fetch_Site="cross-site") == 403
    for origin in ("https://evil.example", "null", "http://[", "http://[::1"):
        assert status("POST", "/predict", Origin=origin) == 403, origin
    assert status("GET", "/examples", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors") == 403
    assert status("GET", "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate") == 200  # a link
    own = {**IMAGE, "Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"}
    assert client.post("/predict", content=photo(), headers=own).status_code == 200


def test_a_token(closed: TestClient):
    assert closed.get("/").status_code == 401
    assert closed.get("/metrics").status_code == 401
    assert closed.get("/live").status_code == 200
    for wrong in ("Bearer wrong", "Basic right", "Bearer", "Bearer \xe9"):
        assert closed.get("/model", headers={b"Authorization": wrong.encode("latin-1")}).status_code == 401
    assert closed.get("/model", headers={"Authorization": "Bearer right"}).status_code == 200
    assert closed.get("/?token=wrong").status_code == 401
    opened = closed.get("/?token=right")
    assert (opened.status_code, opened.headers["location"]) == (303, "/")
    assert "HttpOnly" in opened.headers["set-cookie"]
    assert "samesite=strict" in opened.headers["set-cookie"].lower()
    assert closed.get("/").status_code == 200  # with the cookie
    closed.cookies.clear()


def test_which_addresses_are_this_machine_alone():
    assert all(map(_is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(_is_loopback, ("0.0.0.0", "::", "10.0.0.7", "example.com")))


def test_ready_until_it_ends(predictor: Predictor):
    with TestClient(make_app(predictor)) as client:
        assert client.get("/ready").json()["status"] == "ok"
        client.app.state.service.draining = True  # type: ignore[attr-defined]
        for path in ("/ready", "/health"):
            answer = client.get(path)
            assert (answer.status_code, answer.json()["status"]) == (503, "ending")
        assert client.get("/live").status_code == 200
        refused = client.post("/predict", content=photo(), headers=IMAGE)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")


def test_metrics(predictor: Predictor):
    with TestClient(make_app(predictor)) as client:
        for _ in range(3):
            client.post("/predict", content=photo(), headers=IMAGE)
        client.post("/predict", content=b"broken", headers=IMAGE)
        client.get("/nothing/here")
        text = client.get("/metrics").text
    assert 'smallvit_requests_total{path="/predict",status="200"} 3\n' in text
    assert 'smallvit_requests_total{path="other",status="404"} 1\n' in text
    assert 'smallvit_refusals_total{status="422"} 1\n' in text
    assert 'smallvit_request_seconds_count{path="/predict"} 4\n' in text
    assert 'smallvit_batch_images_bucket{le="1"} 3\n' in text
    assert "smallvit_waiting_images 0\n" in text
    parser = required("prometheus_client.parser")
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert families["smallvit_request_seconds"].type == "histogram"


def test_a_number_of_5000_digits(client: TestClient):
    assert client.get(f"/examples/{'9' * 5000}").status_code == 404


@pytest.mark.parametrize("kind", ["ico", "tga", "ppm", "icns"])
def test_only_usual_kinds_are_read(client: TestClient, kind: str):
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, kind)
    answer = client.post("/predict", content=file.getvalue(), headers=IMAGE)
    assert answer.status_code == 422


def chunk(kind: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


@pytest.mark.parametrize("where", ["before", "behind"])
def test_a_picture_of_empty_parts_is_given_up(client: TestClient, where: str):
    begin = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    many, pixels = chunk(b"abCd") * 500_000, chunk(b"IDAT", zlib.compress(b"\0\0"))
    content = begin + (many + pixels if where == "before" else pixels + many) + chunk(b"IEND")
    begun = time.monotonic()
    answer = client.post("/predict", content=content, headers=IMAGE)
    assert time.monotonic() - begun < 3
    assert answer.status_code == 422
    assert "too many parts" in answer.json()["error"]


def test_16_bits_take_little_more_than_the_image():
    pixels = np.random.default_rng(0).integers(0, 65536, (1500, 1000)).astype(np.uint16)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    tracemalloc.start()
    small = decode(io.BytesIO(file.getvalue()), (1500, 1000), 1, "crop")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * pixels.size  # of which 64 bits alone would take all
    np.testing.assert_array_equal(small[..., 0], np.round(pixels / 65535 * 255).astype(np.uint8))


@contextmanager
def listening(predictor: Predictor, limits: Limits) -> Iterator[tuple[tuple[str, int], _Server]]:
    with closing(socket.create_server(("127.0.0.1", 0))) as bound:
        config = uvicorn.Config(
            make_app(predictor, limits),
            http=limited(limits),
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_level="critical",
            timeout_graceful_shutdown=1,
        )
        server = _Server(config, None)
        thread = threading.Thread(target=server.run, kwargs=dict(sockets=[bound]))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield bound.getsockname(), server
        finally:
            server.should_exit = True
            thread.join(10)


def asked(address: tuple[str, int]) -> bytes:
    with socket.create_connection(address, timeout=5) as client:
        client.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = b""
        while part := client.recv(4096):
            answer += part
        return answer


def test_idle_connections_lock_nobody_out(predictor: Predictor):
    with listening(predictor, Limits(connections=4, header_seconds=60)) as (address, _):
        idle = [socket.create_connection(address, timeout=5) for _ in range(12)]
        try:
            for _ in range(3):
                assert b" 200 OK" in asked(address)
            assert idle[0].recv(1) == b""  # the oldest was closed
        finally:
            for each in idle:
                each.close()


def test_slow_uploads_lock_nobody_out(predictor: Predictor):
    with listening(predictor, Limits(connections=4)) as (address, _):
        slow = [socket.create_connection(address, timeout=5) for _ in range(4)]
        try:
            for each in slow:
                each.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc")
            time.sleep(0.2)
            assert b" 200 OK" in asked(address)
            assert slow[0].recv(1) == b""  # the oldest was closed
        finally:
            for each in slow:
                each.close()


def test_a_header_has_a_deadline_however_it_comes(predictor: Predictor):
    with (
        listening(predictor, Limits(header_seconds=0.5)) as (address, _),
        socket.create_connection(address, timeout=5) as slow,
    ):
        begun = time.monotonic()
        slow.sendall(b"GET /live HTTP/1.1\r\n")
        with suppress(OSError):  # a reset or a broken pipe
            for _ in range(100):
                slow.sendall(b"X")
                time.sleep(0.05)
        assert 0.3 < time.monotonic() - begun < 3
        assert b" 200 OK" in asked(address)


def test_an_upload_at_the_end_is_told_so(predictor: Predictor):
    with (
        listening(predictor, Limits()) as (address, server),
        socket.create_connection(address, timeout=10) as client,
    ):
        client.sendall(
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 9\r\n\r\nabc"
        )
        time.sleep(0.2)
        server.handle_exit(signal.SIGTERM, None)
        assert client.recv(4096).startswith(b"HTTP/1.1 503 ")


@pytest.mark.usefixtures("as_a_user")
def test_no_settings_of_malloc_for_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    restarted: list[bool] = []
    monkeypatch.setattr(__main__, "restart_fast", lambda: restarted.append(True))
    monkeypatch.setattr("sys.argv", ["smallvit", "serve", str(tmp_path)])
    with pytest.raises(SystemExit):
        __main__.main()
    assert restarted == []
