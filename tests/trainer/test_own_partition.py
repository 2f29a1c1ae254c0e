"""Partitions of a user's own: a function's parameters as keys, and what is no partition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedstream.core.errors import ConfigError, DataError
from fedstream.settings.config import read
from fedstream.trainer.data import size_of
from fedstream.trainer.loading import load_task
from fedstream.trainer.partitions import Partition, split

PROGRAM = """
import numpy as np
from fedstream import Partition

def blocks(labels, devices: int, seed: int, size: int = 10) -> list:
    owner = np.arange(len(labels)) // size % devices
    return [np.flatnonzero(owner == device) for device in range(devices)]

def few(labels, devices, seed):
    return [np.array([device]) for device in range(devices)]

def some(labels, devices, seed):
    return few(labels, devices, seed)
some.covers = False

def changes(labels, devices, seed):
    labels[0] = 1

class Halves(Partition):
    share: float = 0.5
    def split(self, labels, devices, seed):
        cut = int(self.share * len(labels))
        return np.split(np.arange(len(labels)), [cut])
"""
LABELS = np.repeat(np.arange(10), 12)


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with partitions."""
    file = tmp_path_factory.mktemp("own") / "own_partitions.py"
    file.write_text(PROGRAM)
    return str(file)


def partition(name: str, *sets: str) -> Partition:
    found = read(None, [f"task.partition.kind={name}", *sets]).task.partition
    assert found is not None
    return found


def test_a_function_is_one_and_its_parameters_are_keys(rules: str) -> None:
    parts = split(partition(f"{rules}:blocks", "task.partition.size=12"), LABELS, 10, 0)
    assert [set(LABELS[rows]) for rows in parts] == [{n} for n in range(10)]
    assert len(split(partition(f"{rules}:blocks"), LABELS, 4, 0)[3]) == 30
    with pytest.raises(ConfigError, match=r"task.partition.sise = 3 .*did you mean .*\.size\?"):
        partition(f"{rules}:blocks", "task.partition.sise=3")
    with pytest.raises(ConfigError, match=r'task.partition.size = "x" .*valid integer'):
        partition(f"{rules}:blocks", "task.partition.size=x")
    with pytest.raises(ConfigError, match="defines no 'blcks'; did you mean 'blocks'"):
        partition(f"{rules}:blcks")


def test_built_in_tasks_take_it_where_they_take_their_own(rules: str) -> None:
    sets = (f"task.partition.kind={rules}:blocks", "task.partition.size=100", "task.devices=5")
    settings = read(None, sets)
    task = load_task("digits", settings.task)
    sizes = [size_of(task.device_data(device), device) for device in range(5)]
    assert sizes == [300, 300, 300, 300, 233]


def test_rows_may_be_left_out_only_if_it_says_so(rules: str) -> None:
    with pytest.raises(DataError, match=r"few', with seed 7: 116 of 120 rows .* such as 4; if "):
        split(partition(f"{rules}:few"), LABELS, 4, 7)
    assert [list(rows) for rows in split(partition(f"{rules}:some"), LABELS, 3, 0)] == [
        [0],
        [1],
        [2],
    ]


def test_its_errors_and_what_it_may_not_do_are_named(rules: str) -> None:
    with pytest.raises(DataError, match=r"changes' raised ValueError: .*read-only at .*:17"):
        split(partition(f"{rules}:changes"), LABELS, 4, 0)
    assert LABELS.flags.writeable


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "it must return a list of 2 arrays of row numbers, not NoneType"),
        ([np.arange(4), []], "device 1 has no rows"),
        ([np.arange(4), np.array([4.0])], r"device 1 has no row numbers, but float64 of shape"),
        ([np.arange(3), np.arange(2, 4)], "row 2 is on devices 0 and 1"),
        ([np.array([0, 1, 1]), np.array([2, 3])], "device 0 has a row twice"),
        ([np.arange(3), np.array([4])], "device 1 has row 4; rows are numbered 0 to 3"),
        ([np.arange(2), np.array([3])], "1 of 4 rows are on no device, such as 2"),
    ],
)
def test_what_is_no_partition_is_refused(found: Any, words: str) -> None:
    class Given(Partition):
        def split(self, labels: Any, devices: int, seed: int) -> Any:
            return found

    with pytest.raises(DataError, match=words):
        split(Given(), np.zeros(4), 2, 0)
