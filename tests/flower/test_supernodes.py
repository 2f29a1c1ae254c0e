"""A stock `flower-supernode` as a device of a gateway: real processes, TLS, and Redis."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import structlog
import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.coordinator.gateway.service import Gateway
from fedstream.coordinator.gateway.settings import GatewaySettings
from fedstream.journal import Taken
from fedstream.journal.replay import Replayer
from fedstream.runtime.http import HttpSettings, application, listening
from fedstream.runtime.tasks import LeaseSettings
from fedstream.wire import F32
from tests.broker.pipeline import finished, pipeline
from tests.support import context, running

pytest.importorskip("flwr", reason="Flower has an environment of its own: make flower")

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]  # each update starts a process
VERSIONS = 20
DEVICES = (1, 4)
APP = """
import numpy as np
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

class Client(NumPyClient):
    def __init__(self, node):
        self.node = node

    def fit(self, parameters, config):
        moved = [array + np.float32(0.25) for array in parameters]
        return moved, 10 + self.node["partition-id"], {"train_loss": config["lr"]}

app = ClientApp(lambda context: Client(context.node_config).to_client())
"""
PROJECT = """
[project]
name = "numpy-app"
version = "1.2.0"
dependencies = ["flwr>=1.41"]
[tool.flwr.app]
publisher = "fedstream"
[tool.flwr.app.components]
serverapp = "numpy_app.client_app:app"
clientapp = "numpy_app.client_app:app"
[tool.flwr.app.config]
learning-rate = 0.125
"""


@pytest.fixture
def redis(any_redis: RedisSettings) -> RedisSettings:
    """One Redis."""
    return any_redis


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A Flower app, built by Flower."""
    folder = tmp_path / "app"
    (folder / "numpy_app").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "numpy_app" / "__init__.py").touch()
    (folder / "numpy_app" / "client_app.py").write_text(APP)
    subprocess.run(
        [Path(sys.executable).with_name("flwr"), "build", "--app", folder], cwd=tmp_path,
        check=True, capture_output=True, env=environment(tmp_path),
    )  # fmt: skip
    [found] = tmp_path.glob("*.fab")
    return found


def environment(folder: Path) -> dict[str, str]:
    """Without telemetry, and with a home of its own for apps."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("FEDSTREAM_")}
    path = f"{Path(sys.executable).parent}:{found['PATH']}"
    return found | {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(folder / "home"), "PATH": path}


def key(folder: Path, device: int) -> str:
    """Makes a key as ssh-keygen does; returns the line that lists it."""
    private = ec.generate_private_key(ec.SECP256R1())
    (folder / f"key-{device}").write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
    )  # fmt: skip
    public = private.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return f"{device} {public.decode()} clinic-{device}\n"


@asynccontextmanager
async def gateway(keys: Keys, redis: RedisSettings, folder: Path, app: Path) -> AsyncIterator[int]:
    """A gateway with TLS; its port."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued.private_key_pem.write_to_path(folder / "tls-key.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "tls-cert.pem")
    settings = GatewaySettings(
        tls_cert=str(folder / "tls-cert.pem"), tls_key=str(folder / "tls-key.pem"),
        flower_app=str(app), flower_keys=str(folder / "keys"),
    )  # fmt: skip
    one = Gateway(settings, LeaseSettings(), keys=keys, redis=redis, name="gw-0", update=F32)
    its = context()
    web = application(one.routes(), its.stop.is_set, its.refused)
    async with AsyncExitStack() as stack:
        http = HttpSettings()
        log = structlog.get_logger()
        at = listening(web, http, 0, 100, log, settings.tls(), its.refused)
        port = await stack.enter_async_context(at)
        await stack.enter_async_context(running(one, its))
        yield port


def free_port() -> int:
    """A port for the supernode's own API, which cannot choose one itself."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def supernode(folder: Path, port: int, device: int) -> Iterator[Path]:
    """The command; the file with what it says. It has to end well when it is told to stop."""
    log = folder / f"supernode-{device}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                Path(sys.executable).with_name("flower-supernode"),
                "--superlink", f"localhost:{port}", "--root-certificates", folder / "ca.pem",
                "--auth-supernode-private-key", folder / f"key-{device}",
                "--node-config", f"partition-id={device} num-partitions=6",
                "--host", "127.0.0.1", "--port", str(free_port()),
            ],
            stdout=output, stderr=output, env=environment(folder), cwd=folder,
        )  # fmt: skip
    try:
        yield log
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


async def test_stock_supernodes_train_a_run(
    client: Client, redis: RedisSettings, keys: Keys, tmp_path: Path, app: Path
) -> None:
    """Twenty versions from two supernodes with a NumPyClient; counts add up, replay is equal."""
    (tmp_path / "keys").write_text("# clinics\n" + "".join(key(tmp_path, n) for n in DEVICES))
    sets = (
        f"run.versions={VERSIONS}", 'coordinator.sites=["pool","gateway"]',
        "scheduler.policy={kind='in_flight', n=2}",
    )  # fmt: skip
    async with (
        pipeline(keys, lambda _role: redis, tmp_path, *sets),
        gateway(keys, redis, tmp_path, app) as port,
    ):
        with supernode(tmp_path, port, 1), supernode(tmp_path, port, 4):
            view = await finished(client, keys, within_s=500)
    assert view.outcomes["applied"] == VERSIONS
    with Replayer(tmp_path / "journal") as replayer:
        moments = [(moment.message, moment.identical) for moment in replayer]
    assert [identical for _, identical in moments if identical is not None] == [True] * VERSIONS
    records = [message for message, _ in moments]
    uploads = [one.upload for one in records if isinstance(one, Taken)]
    assert {one.device for one in uploads} == {*DEVICES}
    assert {one.site for one in uploads} == {"gateway"}
    assert {one.samples - one.device for one in uploads} == {10}  # each partition is its device
    assert {one.loss for one in uploads} == {0.125}  # the run configuration of the app
