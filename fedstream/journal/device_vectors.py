"""The vectors that the strategy keeps, read from the segments that have them."""

from __future__ import annotations

from fedstream.core.layout import vector_of
from fedstream.journal.errors import JournalDamaged, JournalError
from fedstream.journal.segment import Segment
from fedstream.strategies import DeviceVectors, Strategy


def device_vectors(segment: Segment, strategy: Strategy) -> DeviceVectors | None:
    """The vectors that the strategy keeps, each from the segment that it was last written to.

    None if the strategy keeps none, or has not yet. Raises JournalError.
    """
    here, elsewhere = segment.standing.here, segment.elsewhere
    if not (here or elsewhere):
        return None
    vectors = strategy.vectors(segment.layout.parameters)
    wanted: dict[str, set[int]] = {}
    for device, name in elsewhere.items():
        wanted.setdefault(name, set()).add(device)
    _load(segment, set(here), vectors)
    for name, missing in wanted.items():
        path = segment.path.with_name(name)
        if not path.exists():
            raise JournalError(
                f"{path}: is missing, but {segment.path.name} needs it for the vectors of "
                f"{len(missing)} devices, such as device {min(missing)}: restore it"
            )
        with Segment(path) as other:
            _load(other, missing, vectors)
    vectors.changed.clear()
    return vectors


def _load(segment: Segment, devices: set[int], vectors: DeviceVectors) -> None:
    for record, message in segment.vectors():
        if message.device not in devices:
            continue
        vector = vector_of(vectors.write(message.device))
        segment.load(record, vector)
        if not vector.is_of(message.digest):
            raise JournalDamaged(
                f"{record.place.where}: the device's vector does not match its digest"
            )
        devices.discard(message.device)
    if devices:
        raise JournalDamaged(f"{segment.path}: has no vector of device {min(devices)}")
