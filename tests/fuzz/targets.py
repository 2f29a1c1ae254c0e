"""What reads bytes that somebody else wrote: each with valid inputs to begin from."""

from __future__ import annotations

import asyncio
import gzip
import pickle
import struct
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, cast

import msgpack
import numpy as np
import tomli_w
import xxhash
from pydantic import ValidationError

from fedstream.broker import blobs
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.commands import Command
from fedstream.broker.link import BulkPlace, Bulks
from fedstream.core import reasons
from fedstream.core.errors import ConfigError, Undecodable
from fedstream.core.formats import format_of
from fedstream.core.layout import Layout, Model
from fedstream.core.messages import Message, decode
from fedstream.runtime.config import load
from fedstream.settings.config import Settings
from fedstream.trainer import images
from fedstream.trainer.workspace import Workspace
from tests.fuzz import devices, journals
from tests.fuzz.harness import Target
from tests.support import layout_of, model_of

MESSAGES = Path(__file__).parents[1] / "data" / "messages"
SMALL = layout_of(parameters=5, buffers=2, integers=1)
MOST = 64 << 20  # bytes of a model that a target makes


@cache
def targets() -> dict[str, Target]:
    """All of them, by name."""
    every = (
        Target("message", _message, values=[_unpacked(p) for p in sorted(MESSAGES.iterdir())]),
        Target("layout", _layout, values=[_unpacked_bytes(layout.encode()) for layout in _LAYOUTS]),
        Target("blob", _blob, values=[_stored(_SMALL), _stored(_LARGE)]),
        Target("update", _update, values=_sent()),
        Target("workspace", _workspace, values=_workspaces(), encode=_with_checksum),
        Target("settings", _settings, values=_tables(), encode=_toml, texts=[_TOML]),
        Target("set", _set, texts=_SETS),
        Target("url", _url, texts=_URLS),
        Target("idx", _idx, texts=_IDX),
        Target(
            "journal",
            journals.read,
            values=journals.values(),
            encode=journals.encoded,
            texts=journals.files(),
        ),
        Target("cifar", _cifar, values=[_CIFAR], encode=_pickled),
        *devices.targets(),
    )
    return {target.name: target for target in every}


# messages


def _unpacked(path: Path) -> Any:
    return _unpacked_bytes(path.read_bytes())


def _unpacked_bytes(data: bytes) -> Any:
    return msgpack.unpackb(data, strict_map_key=False)


def _every_kind(cls: type[Message] = Message) -> list[type[Message]]:
    return [one for kind in cls.__subclasses__() for one in (kind, *_every_kind(kind))]


def _message(data: bytes) -> None:
    """Any service reads an entry. What it takes for a message, it must be able to write."""
    read = decode(data, *_every_kind())
    assert decode(read.encode(), type(read)).encode() == read.encode()


# layouts and models

_LAYOUTS = (SMALL, layout_of(3), SMALL.with_controls())


def _layout(data: bytes) -> None:
    """A service reads a run's layout, and makes a model of it."""
    layout = Layout.decode(data)
    assert Layout.decode(layout.encode()).signature == layout.signature
    if layout.nbytes <= MOST:
        model = Model(layout)
        model.buffer[:] = 0
        model.tensors()


class _Redis:
    """Has one hash, and answers the two commands that reading a blob takes."""

    def __init__(self, fields: dict[bytes, bytes]) -> None:
        self.fields = fields

    async def pipeline(
        self, commands: Sequence[Command], *, into: Sequence[BulkPlace] | None = None
    ) -> list[Any]:
        replies = [self._answer(*command) for command in commands]
        if into is None:
            return replies
        bulks = Bulks(len(replies), into, ValueError)
        for part in replies:
            said = b"$-1\r\n" if part is None else b"$%d\r\n%b\r\n" % (len(part), part)
            bulks.feed(memoryview(said))
        return bulks.replies

    def _answer(self, name: object, _key: object, *fields: object) -> Any:
        found = [self.fields.get(str(_text(field)).encode()) for field in fields]
        match name:
            case "HMGET":
                return found
            case "HGET":
                return found[0]
        raise NotImplementedError(name)


def _text(field: object) -> object:
    return field.decode() if isinstance(field, bytes) else field


def _small() -> Model:
    return model_of(SMALL, *range(SMALL.floats), integers=[7])


def _large() -> Model:
    model = Model(layout_of(300_000))
    model.floats[:] = np.arange(300_000, dtype=np.float32)
    return model


_SMALL, _LARGE = _small(), _large()  # of one chunk, of two


def _stored(model: Model) -> dict[str, bytes]:
    data = model.buffer.tobytes()
    chunks = range(0, len(data), blobs.CHUNK)
    fields = {str(n): data[at : at + blobs.CHUNK] for n, at in enumerate(chunks)}
    return {"size": str(len(data)).encode(), **fields}


def _blob(data: bytes) -> None:
    """The updater reads an update's blob, which a trainer wrote."""
    try:
        stored = _unpacked_bytes(data)
    except (ValueError, TypeError, msgpack.UnpackException):
        return  # no hash: Redis would have none like it
    if not isinstance(stored, dict):
        return
    fields = {str(_text(k)).encode(): v for k, v in stored.items() if isinstance(v, bytes)}
    wanted = _LARGE if len(fields.get(b"size", b"")) > 2 else _SMALL
    into = Model(wanted.layout)
    redis = cast("Client", _Redis(fields))
    asyncio.run(blobs.read(redis, "update", into, digest=wanted.digest(), chunks=None))
    assert into.digest() == wanted.digest()


# encoded updates

_ENCODED = layout_of(parameters=300, buffers=2, integers=1)
_FORMATS = tuple(
    f"{name}{frame}"
    for name in ("f32", "bf16", "int8", "int4", "topk:0.1", "topk:1")
    for frame in ("", "+zstd")
)


def _sent() -> list[dict[str, Any]]:
    model = Model(_ENCODED)
    model.floats[:] = np.linspace(-1, 1, _ENCODED.floats)
    model.integers[:] = 7
    encoded = ((name, format_of(name).encoded(model)) for name in _FORMATS)
    return [{"format": name, "bytes": data.tobytes()} for name, data in encoded]


def _update(data: bytes) -> None:
    """The updater decodes what a trainer sent: into a model, or it has a reason of the table."""
    try:
        said = _unpacked_bytes(data)
    except (ValueError, TypeError, msgpack.UnpackException):
        return  # no message
    name, sent = (said.get("format"), said.get("bytes")) if isinstance(said, dict) else (0, 0)
    if not isinstance(name, str) or not isinstance(sent, bytes):
        return
    into = Model(_ENCODED)
    try:
        how = format_of(name)
        how.decode(np.frombuffer(sent, np.uint8), into)
    except Undecodable as error:
        if error.reason not in reasons.REFUSED:
            raise AssertionError(f"no reason: {error.reason}") from error
        raise
    # Whatever can be decoded says the same when it is decoded again.
    again = Model(_ENCODED)
    how.decode(np.frombuffer(sent, np.uint8), again)
    assert again.digest() == into.digest()


# workspaces


def _workspaces() -> list[dict[str, Any]]:
    model = _small()
    saved = Workspace(
        task="t",
        device=1,
        version=3,
        base=model.digest(),
        layout=SMALL.signature,
        seed=1,
        solver="{}",
        samples=10,
        steps=4,
        step=2,
        seconds=0.5,
        loss=1.0,
        minibatches=b"12",
        position=1,
        generators=(b"1",),
        x=model.buffer,
        x_tau=model.buffer,
        rates=bytes(8),
        optimizers=b"",
        control=model.parameters,
    )
    return [_unpacked_bytes(saved.encode()[8:])]


def _with_checksum(value: Any) -> bytes:
    packed = msgpack.packb(value, unicode_errors="replace")
    assert isinstance(packed, bytes)
    return xxhash.xxh3_64_digest(packed) + packed


def _workspace(data: bytes) -> None:
    """A trainer goes on with what another one left."""
    saved = Workspace.decode(data)
    for model in saved.models(SMALL):
        model.digest()


# configuration

_TOML = b'[run]\nname = "demo"\nversions = 10\n[strategy]\nname = "fedbuff"\n'
_SETS = [
    text.encode()
    for text in (
        "strategy.alpha=0.3",
        "strategy.staleness.kind=hinge",
        "run.name=demo",
        "solver.lr=1e-3",
        'devices.latency={kind="fixed", mean_s=0.5}',
        "scheduler.policy.kind=in_flight",
        "redis.password=123",
        "task.devices=12",
    )
]
_URLS = [
    text.encode()
    for text in (
        "redis://127.0.0.1:6379/0",
        "rediss://user:word@[::1]:1/2?ssl_cert_reqs=required",
        "unix:///tmp/redis.sock?db=1",
        "redis://h?socket_timeout=3&protocol=3",
    )
]


def _tables() -> list[dict[str, Any]]:
    changed: list[dict[str, Any]] = [
        {"strategy": {"name": "afa-cs", "devices": 10}, "task": {"devices": 10}},
        {"strategy": {"name": "scaffold"}, "solver": {"kind": "scaffold"}},
        {"scheduler": {"policy": {"kind": "none"}}, "trainer": {"anarchic": {"rate": 1.0}}},
        {"devices": {"latency": {"kind": "fixed", "mean_s": 0.5}}},
    ]
    return [Settings().model_dump(mode="json", exclude_none=True), *changed]


def _toml(value: Any) -> bytes:
    try:
        text = tomli_w.dumps(value if isinstance(value, dict) else {"run": value})
    except (TypeError, ValueError, AttributeError, RecursionError):  # TOML has no form for it
        text = f"run = {value!r}"
    return text.encode(errors="surrogatepass")


def _settings(data: bytes) -> None:
    """A command reads a configuration file."""
    _of_file(data, "run.toml", lambda path: load(Settings, path=path, environ={}))


def _set(data: bytes) -> None:
    """A command reads ``--set``, and the environment."""
    text = data.decode(errors="surrogateescape")
    key, _, value = text.partition("=")
    name = "FEDSTREAM_" + key.upper().replace(".", "__")
    load(Settings, path=None, environ={name: value}, sets=[text])


def _url(data: bytes) -> None:
    """A service reads Redis's address."""
    try:
        settings = RedisSettings(url=data.decode(errors="replace"))
    except ValidationError as error:
        raise ConfigError(str(error)) from error
    Client(settings)


# data sets

_IDX = [
    b"\0\0\x08\x03" + struct.pack(">III", 2, 28, 28) + bytes(2 * 28 * 28),
    gzip.compress(b"\0\0\x08\x01" + struct.pack(">I", 3) + bytes(3)),
]
_CIFAR = {"data": [[1] * 3072] * 2, "labels": [3, 4]}


def _idx(data: bytes) -> None:
    """A trainer reads MNIST."""
    name = "train.gz" if data[:2] == b"\x1f\x8b" else "train"
    _of_file(data, name, lambda path: images._idx(path.parent, "train"))


def _pickled(value: Any) -> bytes:
    found = value if isinstance(value, dict) else {"data": value}
    with suppress(TypeError, ValueError, OverflowError, RecursionError):  # no array of bytes
        found = found | {"data": np.array(found.get("data"), dtype=np.uint8)}
    return pickle.dumps(found, protocol=2)


def _cifar(data: bytes) -> None:
    """A trainer reads a batch of CIFAR-10, which is a pickle."""
    _of_file(data, "batch", images._batch)


def _of_file(data: bytes, name: str, read: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        read(path)
