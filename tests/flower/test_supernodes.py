"""Stock `flower-supernode`s as devices of a gateway: real processes, TLS, and Redis.

Each is of another release of Flower. `make flower` installs one in its environment, and the others
beside it, in `supernodes/RELEASE`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest
import structlog
import trustme
from aiohttp.web import Request
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.coordinator.gateway.fleet.protobuf import TESTED
from fedstream.coordinator.gateway.service import Gateway
from fedstream.coordinator.gateway.settings import GatewaySettings
from fedstream.core.formats import F32
from fedstream.journal import Taken
from fedstream.journal.replay import Replayer
from fedstream.runtime.http import HttpSettings, application, listening
from fedstream.runtime.limits import ConnectionLimit
from fedstream.runtime.task_settings import LeaseSettings
from fedstream.runtime.tls import CurrentTls
from tests.broker.pipeline import finished, pipeline
from tests.support import context, free_port, running

pytest.importorskip("flwr", reason="Flower has an environment of its own: make flower")

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]  # each update starts a process
VERSIONS = 20
DEVICES = dict(zip((1, 3, 4), TESTED, strict=True))  # device -> release of its supernode
RELEASE = version("flwr").rpartition(".")[0]  # of this environment
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
dependencies = ["flwr>=1.40"]
[tool.flwr.app]
publisher = "fedstream"
[tool.flwr.app.components]
serverapp = "numpy_app.client_app:app"
clientapp = "numpy_app.client_app:app"
[tool.flwr.app.config]
learning-rate = 0.125
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A Flower app, built by Flower."""
    folder = tmp_path / "app"
    (folder / "numpy_app").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "numpy_app" / "__init__.py").touch()
    (folder / "numpy_app" / "client_app.py").write_text(APP)
    subprocess.run(
        [Path(sys.executable).with_name("flwr"), "build", "--app", folder],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        env=environment(tmp_path),
    )
    [found] = tmp_path.glob("*.fab")
    return found


def commands(release: str) -> Path:
    """The folder with the commands of a release."""
    here = Path(sys.executable).parent
    found = here if release == RELEASE else here.parent / "supernodes" / release / "bin"
    assert (found / "flower-supernode").exists(), f"no Flower {release}: make flower installs it"
    return found


def environment(folder: Path, release: str = RELEASE) -> dict[str, str]:
    """Without telemetry, and with a home of its own for apps."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("FEDSTREAM_")}
    path = f"{commands(release)}:{Path(sys.executable).parent}:{found['PATH']}"
    more = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(folder / f"home-{release}")}
    if release != RELEASE:
        more["PYTHONPATH"] = str(commands(release).parent)
    return found | more | {"PATH": path}


def key(folder: Path, device: int) -> str:
    """Makes a key as ssh-keygen does; returns the line that lists it."""
    private = ec.generate_private_key(ec.SECP256R1())
    (folder / f"key-{device}").write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
    )
    public = private.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return f"{device} {public.decode()} clinic-{device}\n"


@asynccontextmanager
async def gateway(
    keys: Keys, redis: RedisSettings, folder: Path, app: Path
) -> AsyncIterator[tuple[int, set[str]]]:
    """A gateway with TLS: its port, and the releases of the supernodes that come."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued.private_key_pem.write_to_path(folder / "tls-key.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "tls-cert.pem")
    settings = GatewaySettings(
        tls_cert=str(folder / "tls-cert.pem"),
        tls_key=str(folder / "tls-key.pem"),
        flower_app=str(app),
        flower_keys=str(folder / "keys"),
    )
    one = Gateway(settings, LeaseSettings(), keys=keys, redis=redis, name="gw-0", update=F32)
    its, tls = context(), settings.tls()
    assert tls is not None
    web = application(one.routes(), its.stop.is_set, its.refused)
    came: set[str] = set()

    async def note(request: Request, _response: object) -> None:
        came.add(request.headers.get("flwr-package-version", "").rpartition(".")[0])

    web.on_response_prepare.append(note)
    async with AsyncExitStack() as stack:
        http = HttpSettings()
        log = structlog.get_logger()
        at = listening(web, http, 0, ConnectionLimit(100), log, CurrentTls(tls), its.refused)
        port = await stack.enter_async_context(at)
        await stack.enter_async_context(running(one, its))
        yield port, came


@contextmanager
def supernode(folder: Path, port: int, device: int) -> Iterator[Path]:
    """The command; the file with what it says. It has to end well when it is told to stop."""
    log = folder / f"supernode-{device}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                commands(DEVICES[device]) / "flower-supernode",
                "--superlink",
                f"localhost:{port}",
                "--root-certificates",
                folder / "ca.pem",
                "--auth-supernode-private-key",
                folder / f"key-{device}",
                "--node-config",
                f"partition-id={device} num-partitions=6",
                "--host",
                "127.0.0.1",
                "--port",
                str(free_port()),
            ],
            stdout=output,
            stderr=output,
            env=environment(folder, DEVICES[device]),
            cwd=folder,
        )
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
    """Twenty versions by a NumPyClient, with a supernode of each release that the docs name."""
    (tmp_path / "keys").write_text("# clinics\n" + "".join(key(tmp_path, n) for n in DEVICES))
    sets = (
        f"run.versions={VERSIONS}",
        'coordinator.sites=["pool","gateway"]',
        "scheduler.policy={kind='in_flight', n=3}",
    )
    async with (
        pipeline(keys, lambda _role: redis, tmp_path, *sets),
        gateway(keys, redis, tmp_path, app) as (port, came),
    ):
        with ExitStack() as stack:
            for device in DEVICES:
                stack.enter_context(supernode(tmp_path, port, device))
            view = await finished(client, keys, within_s=500)
    assert came == {*TESTED}
    assert view.outcomes["applied"] == VERSIONS
    with Replayer(tmp_path / "journal") as replayer:
        moments = [(moment.message, moment.identical) for moment in replayer]
    assert [identical for _, identical in moments if identical is not None] == [True] * VERSIONS
    records = [message for message, _ in moments]
    uploads = [one.upload for one in records if isinstance(one, Taken)]
    assert {one.device for one in uploads} == {*DEVICES}
    assert {one.site for one in uploads} == {"gateway"}
    claims = {(one.claimed or one.samples) - one.device for one in uploads}
    assert claims == {10}  # each partition is its device
    assert {one.loss for one in uploads} == {0.125}  # the run configuration of the app
