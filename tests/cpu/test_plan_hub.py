"""`ridgeline plan` reads the config of a hub id: from a hub of this test, over HTTP, and without any other file."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from ridgeline.archs import spec_from_config
from ridgeline.catalog.models import published_config

COMMIT = "d" * 40
NAME = "some-lab/new-model-1b"
CONFIG = published_config("smollm2-135m")
assert CONFIG is not None
CONFIG = CONFIG | {"num_hidden_layers": 7}  # so that it is no model of the catalog
BODY = json.dumps(CONFIG).encode()


class Hub(BaseHTTPRequestHandler):
    """The part of the hub that lists a repository and sends its config.json; anything else is not found."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.startswith(f"/api/models/{NAME}/tree/"):
            names = ("config.json", "model.safetensors", "tokenizer.json")
            files = [{"type": "file", "path": name, "oid": "0" * 40, "size": 9} for name in names]
            self._send(json.dumps(files).encode())
        elif self.path.startswith(f"/api/models/{NAME}"):
            files = [{"rfilename": name} for name in ("config.json", "model.safetensors", "tokenizer.json")]
            self._send(json.dumps({"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": files}).encode())
        elif self.path.startswith(f"/{NAME}/resolve/") and self.path.endswith("/config.json"):
            self._send(BODY)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        for name, value in (
            ("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("X-Repo-Commit", COMMIT),
            ("ETag", f'"{hashlib.sha1(body).hexdigest()}"'),
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """Serve a hub; yield its address and the paths that were asked."""
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", Hub.asked
    server.shutdown()
    server.server_close()


def plan(home: Path, endpoint: str, name: str, **env: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "ridgeline", "plan", name, "--hardware", "h100", "--context", "512", "--json"]
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **env}
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, **own}, check=False)


def test_a_hub_ids_config_is_read(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    done = plan(tmp_path, endpoint, NAME)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["model"] == NAME and found["num_params"] == spec_from_config(CONFIG).num_params()
    assert not any("safetensors" in path or "tokenizer" in path for path in asked)  # nothing but the config
    # The hub's cache answers without a network.
    again = plan(tmp_path, "http://127.0.0.1:9", NAME, HF_HUB_OFFLINE="1")
    assert again.returncode == 0 and json.loads(again.stdout) == found


def test_a_name_of_the_catalog_asks_no_hub(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    assert plan(tmp_path, endpoint, "HuggingFaceTB/SmolLM2-135M").returncode == 0
    assert plan(tmp_path, endpoint, "smollm2-135").returncode == 2  # no hub id: an error with the nearest names
    assert asked == []


def test_an_unknown_hub_id_has_one_line(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    for endpoint, env in ((hub[0], {}), ("http://127.0.0.1:9", {"HF_HUB_OFFLINE": "1"})):
        done = plan(tmp_path, endpoint, "some-lab/no-such-model", **env)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
        assert "unknown model 'some-lab/no-such-model'" in done.stderr and "the hub" in done.stderr
        assert "did you mean" in done.stderr
