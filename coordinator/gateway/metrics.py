"""Metrics of a gateway; names and meanings are in docs/reference/metrics.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge

from fedstream.coordinator.gateway.refusals import REFUSALS

if TYPE_CHECKING:
    from fedstream.coordinator.gateway.models import ModelCopies
    from fedstream.coordinator.gateway.replica import Replica


class GatewayMetrics:
    """Metrics of one replica."""

    def __init__(
        self,
        registry: CollectorRegistry,
        replica: Replica,
        models: ModelCopies,
    ) -> None:
        sessions = replica.sessions
        gauges = {
            "devices": ("Devices present.", lambda: len(sessions.present())),
            "polls": ("Check-ins that wait for a task.", lambda: sessions.polls),
            "tasks": ("Tasks in hand.", lambda: len(sessions)),
            "downloads": ("Model downloads in progress.", lambda: models.downloads),
            "changes_bytes": (
                "Bytes of changes between models in memory.",
                lambda: models.changes_bytes,
            ),
        }
        for name, (about, value) in gauges.items():
            Gauge(f"fedstream_gateway_{name}", about, registry=registry).set_function(value)
        Gauge(
            "fedstream_gateway_devices_limit", "The setting gateway.devices.", registry=registry
        ).set(replica.settings.devices)
        self.offered = Counter(
            "fedstream_gateway_offered", "Offers of tasks to devices.", registry=registry
        )
        self.uploads = Gauge(
            "fedstream_gateway_uploads", "Updates that devices are sending now.", registry=registry
        )
        self.upload_bytes = Counter(
            "fedstream_gateway_upload_bytes",
            "Bytes of updates that devices sent.",
            registry=registry,
        )
        self.saved_bytes = Counter(
            "fedstream_gateway_saved_bytes",
            "Bytes of models not downloaded because a device got the changes in one answer.",
            registry=registry,
        )
        self._refused = Counter(
            "fedstream_gateway_refused",
            "Requests answered with an error.",
            ["reason"],
            registry=registry,
        )
        for reason in REFUSALS:
            self._refused.labels(reason)

    def refused(self, reason: str) -> None:
        """Count a refusal."""
        self._refused.labels(reason).inc()
