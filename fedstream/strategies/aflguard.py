"""AFLGuard: an update counts only if it is near the newest one of a device with clean data."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from fedstream.core import reasons
from fedstream.core.errors import ConfigError
from fedstream.core.layout import Layout, Model
from fedstream.strategies import robust
from fedstream.strategies.batches import FedBuffSettings
from fedstream.strategies.strategy import Decision, InRounds, State, Update

_ROOT = "root"


class AflGuardSettings(FedBuffSettings):
    """AFLGuard: x_{t+1} = x_t + server_lr s(d) g for every g with |g - g_root| <= lambda |g_root|.

    AFLGuard: Byzantine-robust Asynchronous Federated Learning (Fang, Liu, Gong, Bentley; ACSAC
    2022), equation 4 and algorithm 3, with g = x_new - x_tau. The paper's server computes g_root on
    its own clean data at every x_t. Here the server has no data: g_root is the newest update of a
    root device, which the run's owner operates. It does not move the model itself, and until the
    first one, all others are refused. Floating-point buffers are judged in the same way.

    As in FedBuff, a version may take more than one update, or the middle of them.
    """

    rounds: ClassVar[InRounds] = "never"
    name: Literal["aflguard"] = "aflguard"  # type: ignore[assignment]
    buffer_size: Annotated[int, Field(ge=1)] = 1
    """K, the updates in a version; the paper has 1"""
    root: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, strict=False)] = (
        0,
    )
    """the devices whose updates judge the others"""
    radius: Annotated[float, Field(gt=0)] = 1.5
    """lambda"""

    @property
    def vector_names(self) -> tuple[str, ...]:
        """The newest update of a root device, and FedBuff's vectors."""
        return (_ROOT, *super().vector_names)

    @property
    def names_suspects(self) -> bool:
        """True: the devices whose updates are refused."""
        return True

    @property
    def references(self) -> Container[int]:
        """The root devices."""
        return self.root

    def span(self, layout: Layout) -> int:
        """The parameters and the buffers."""
        return layout.floats

    def build(self, devices: int = 0) -> Self:
        """The rule for a run with ``devices`` devices. Raises ConfigError."""
        if devices and max(self.root) >= devices:
            raise ConfigError(
                f"strategy.root = {list(self.root)}: there is no device {max(self.root)}: the "
                f"run's {devices} devices (task.devices) are numbered from 0"
            )
        if 0 < devices == len(set(self.root)):
            raise ConfigError(
                f"strategy.root = {list(self.root)}: all {devices} devices (task.devices) judge "
                "the others, so none is left to make versions: name fewer"
            )
        return self

    def completes(self, arrived: dict[int, int], device: int) -> bool:
        """Count an update, as if none were refused; a root device's completes nothing."""
        return device not in self.root and super().completes(arrived, device)

    def receive(self, state: State, update: Update, spare: Model) -> tuple[State, Decision]:
        """Keep a root device's update; let FedBuff take another one, if it is near enough."""
        d = state.version - update.tau
        if self.is_too_stale(d):
            return state, Decision("dropped", 0.0, d)
        vectors = state.memory.devices
        if update.device in self.root:
            vectors = vectors or self.vectors(self.span(update.model.layout))
            vectors.write(_ROOT)[:] = update.model.floats
            kept = replace(state, memory=replace(state.memory, devices=vectors))
            weight = self.weight_of(state, update)
            return kept, Decision("buffered", weight, d, is_reference=True)
        if vectors is None or _ROOT not in vectors:
            return state, Decision("dropped", 0.0, d, reasons.NO_ROOT)
        sent, root, size = update.model.floats, vectors[_ROOT], update.model.layout.parameters
        for part in (slice(size), slice(size, None)):
            if robust.distance(sent[part], root[part]) > self.radius * robust.norm(root[part]):
                return state, Decision("dropped", 0.0, d, reasons.FAR_FROM_ROOT)
        return super().receive(state, update, spare)
