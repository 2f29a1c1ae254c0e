"""The Redis servers at hand, each started once; for each test a run that leaves nothing."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog
from hypothesis import HealthCheck, settings

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.cli.app import main
from fedstream.core.errors import BadMessage
from fedstream.core.messages import Upload
from fedstream.local.redis_server import find_servers
from tests.broker.servers import Redis
from tests.broker.servers import redis as redis_server
from tests.preloaded import Preloaded, programs
from tests.processes import Processes
from tests.support import EveryRole, Hand

if TYPE_CHECKING:
    from collections.abc import Callable

# Read when torch is loaded, here and in the processes that tests start. Side by side, their threads
# would spin against one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples every time, so that a failure is the change's and not the weather's.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("repeatable")

_run_numbers = count(1)


def pytest_configure(config: pytest.Config) -> None:
    """Nobody starts a process unmarked, and what forks programs is started once."""
    config.pluginmanager.register(Processes())
    config.pluginmanager.register(Preloaded())


def pytest_collection(session: pytest.Session) -> None:
    """Collects tests but no garbage: there is none, and to look for it doubles the time."""
    gc.disable()
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if workers and session.config.args == session.config.getini("testpaths"):
        number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        _compile(sorted(Path(__file__).parent.rglob("test_*.py"))[number::workers])


def _compile(files: Sequence[Path]) -> None:
    """Import a worker's share of the test files, which compiles them in a fresh clone.

    The other workers' share it then finds compiled.
    """
    root = Path(__file__).parents[1]
    for file in files:
        with suppress(Exception, pytest.skip.Exception):  # its collection reports it
            import_module(".".join(file.relative_to(root).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Whatever there is by now stays."""
    gc.freeze()
    gc.enable()


def _versions() -> dict[str, Path]:
    """The servers at hand by what they call themselves, such as ``redis-7.0.15``."""
    found: dict[str, Path] = {}
    for binary in find_servers():
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
        version = re.search(r"v=(\S+)", said.stdout)
        assert version, said.stdout
        found.setdefault(f"{said.stdout.split()[0].lower()}-{version[1]}", binary)
    return found


_SERVERS = _versions()
_ORDERED = sorted(_SERVERS, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])


@pytest.fixture(scope="session")
def server_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Redis]]:
    """The server of a name, started when it is first asked for. Whoever asks may do all there."""
    running: dict[str, Redis] = {}
    with ExitStack() as stack:

        def server(name: str) -> Redis:
            if name not in running:
                at = redis_server(tmp_path_factory.mktemp(name), binary=_SERVERS[name])
                running[name] = stack.enter_context(at)
            return running[name]

        yield server


@pytest.fixture
def any_redis(server_of: Callable[[str], Redis]) -> RedisSettings:
    """The newest Redis at hand."""
    return RedisSettings(url=server_of(_ORDERED[-1]).url)


@pytest.fixture
def redis(any_redis: RedisSettings) -> RedisSettings:
    """One Redis; tests/broker has each at hand, and a cluster, since the contract holds on all."""
    return any_redis


@pytest.fixture
async def client(redis: RedisSettings) -> AsyncIterator[Client]:
    """A connection to Redis."""
    client = Client(redis, "test")
    yield client
    await client.close()


@pytest.fixture
async def keys(client: Client) -> AsyncIterator[Keys]:
    """A run's keys. After the test nothing may be left that has no owner, and then nothing at all.

    Owned: a model that is kept, the run's frozen parameters, an update that is in the queue;
    anything else has to expire.
    """
    keys = Keys(f"test-{next(_run_numbers)}")
    client.bind(keys.prefix)
    yield keys
    await client.call("CONFIG", "SET", "maxmemory", 0)
    names = [name.decode() for name in await client.call("KEYS", "*")]
    assert [name for name in names if not name.startswith(keys.prefix)] == []
    kept = {keys.model(blob) for blob in await EveryRole(client, keys, "test").kept()}
    queued = set()
    for _, fields in await client.call("XRANGE", keys.queue, "-", "+"):
        try:
            queued.add(keys.queued(Upload.decode(fields[1]).blob))
        except BadMessage:  # junk that the test put there
            continue
    for name in names:
        if name.startswith((keys.model(""), keys.update(""), keys.queued(""))):
            is_unshared = name.startswith(keys.model("unshared-"))
            owned = name in kept or name in queued or is_unshared
            assert owned or await client.call("PTTL", name) != -1, f"{name} is there for ever"
    await EveryRole(client, keys, "test").purge()
    assert await client.call("KEYS", "*") == []


@pytest.fixture
def ledger(client: Client, keys: Keys) -> EveryRole:
    """The run's ledger."""
    return EveryRole(client, keys, "test")


@pytest.fixture
def hand(client: Client, keys: Keys, ledger: EveryRole) -> Hand:
    """Every service's part, played by hand."""
    return Hand(client, keys, ledger)


@pytest.fixture(scope="session")
def quick_programs(pytestconfig: pytest.Config) -> Iterator[Path]:
    """A folder with `fedstream` and `python`, which start in a tenth of the time."""
    shared = getattr(pytestconfig, "workerinput", {}).get("programs")
    if shared:
        yield Path(shared)
    else:
        with programs() as folder:
            yield folder


@pytest.fixture(scope="session")
def python(quick_programs: Path) -> Path:
    """A Python that starts fedstream's processes by a fork."""
    return quick_programs / "python"


@pytest.fixture
def kernel_name(
    python: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> str:
    """A Jupyter kernel that ``python`` starts, as it starts the services of the kernel's runs."""
    folder = tmp_path_factory.mktemp("jupyter")
    program, spec = folder / "kernel.py", folder / "kernels" / "quick" / "kernel.json"
    program.write_text("from ipykernel.kernelapp import launch_new_instance as run\n\nrun()\n")
    spec.parent.mkdir(parents=True)
    argv = [str(python), str(program), "-f", "{connection_file}"]
    spec.write_text(json.dumps({"argv": argv, "display_name": "quick", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(folder))
    return "quick"


@pytest.fixture
def journal(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `fedstream journal` in this process: exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["journal", *map(str, arguments)])
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


@pytest.fixture(autouse=True)
def _plain_tracebacks() -> Iterator[None]:
    """As services log them: structlog's own, with colours and all locals, take half a second each.

    That is how long the event loop stands still then.
    """
    before = structlog.get_config()
    *others, _ = before["processors"]
    plain = structlog.dev.ConsoleRenderer(
        colors=False, exception_formatter=structlog.dev.plain_traceback
    )
    structlog.configure(processors=[*others, plain])
    yield
    structlog.configure(**before)
