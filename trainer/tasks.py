"""The built-in tasks by name: real data sets, split over devices according to the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstream.trainer.cifar import cifar10_afl, cifar10_fedasync
from fedstream.trainer.digits import digits, mnist
from fedstream.trainer.shakespeare import shakespeare
from fedstream.trainer.wikitext import wikitext2

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedstream.trainer.task import Task, TaskSettings

__all__ = [
    "BUILT_IN", "cifar10_afl", "cifar10_fedasync", "digits", "mnist", "shakespeare", "wikitext2"
]  # fmt: skip

BUILT_IN: dict[str, Callable[[TaskSettings], Task]] = {
    "digits": digits,
    "mnist": mnist,
    "cifar10-fedasync": cifar10_fedasync,
    "cifar10-afl": cifar10_afl,
    "wikitext2": wikitext2,
    "shakespeare": shakespeare,
}
