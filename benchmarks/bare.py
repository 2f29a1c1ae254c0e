"""The baseline: the same bytes through a Redis, with nothing around them.

Two echo processes read the newest model and write it back as an update; one loop reads the update,
mixes it in with the pipeline's own arithmetic and writes the new model. It uses plain redis-py with
hiredis, chunks of 1 MiB and lists as queues: no checks, digests, ids, leases or recovery.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import numpy as np
import redis

from fedstream.broker.blobs import CHUNK
from fedstream.core.layout import Layout, Model, Tensor
from fedstream.strategies.mixing import mix


def _write(client: redis.Redis, key: str, model: Model) -> None:
    pipeline = client.pipeline(transaction=False)
    data = model.buffer.data
    for number, start in enumerate(range(0, len(data), CHUNK)):
        pipeline.hset(key, number, bytes(data[start : start + CHUNK]))
    pipeline.execute()


def _read(client: redis.Redis, key: str, into: Model) -> None:
    pipeline = client.pipeline(transaction=False)
    for number in range(-(-into.buffer.nbytes // CHUNK)):
        pipeline.hget(key, number)
    at = 0
    for chunk in pipeline.execute():
        into.buffer[at : at + len(chunk)] = np.frombuffer(chunk, dtype=np.uint8)
        at += len(chunk)


def _pop(client: redis.Redis, key: str) -> bytes:
    popped: Any = client.blpop([key])
    return bytes(popped[1])


def _echo(url: str, layout: Layout) -> None:
    client = redis.Redis.from_url(url)
    model = Model(layout)
    while True:
        task = _pop(client, "bare:tasks")
        if task == b"stop":
            return
        _read(client, "bare:model", model)
        _write(client, f"bare:update:{task.decode()}", model)
        client.rpush("bare:uploads", task)


def updates_per_second(url: str, parameters: int, updates: int, in_flight: int = 4) -> float:
    """Updates per second with two echo processes and ``in_flight`` tasks in flight."""
    layout = Layout((Tensor("x", (parameters,), "float32", "parameter"),))
    client = redis.Redis.from_url(url)
    x, update, spare = Model(layout), Model(layout), Model(layout)
    x.floats[:] = 0.01
    _write(client, "bare:model", x)
    context = multiprocessing.get_context("spawn")
    echoes = [context.Process(target=_echo, args=(url, layout)) for _ in range(2)]
    for echo in echoes:
        echo.start()
    try:
        client.rpush("bare:tasks", *range(in_flight))
        warm = max(2, updates // 10)
        started = 0.0
        for n in range(warm + updates):
            if n == warm:
                started = time.perf_counter()
            task = _pop(client, "bare:uploads")
            key = f"bare:update:{task.decode()}"
            _read(client, key, update)
            client.unlink(key)
            mix(x, update, 0.4, into=spare)
            x, spare = spare, x
            _write(client, "bare:model", x)
            client.rpush("bare:tasks", in_flight + n)
        return updates / (time.perf_counter() - started)
    finally:
        client.delete("bare:tasks")
        client.rpush("bare:tasks", "stop", "stop")
        for echo in echoes:
            echo.join(10)
        client.close()
