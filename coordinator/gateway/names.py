"""The names by which devices reach a gateway, for one of which each signature must be made.

Otherwise whoever got devices to talk to them could hand their signatures on, and get their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from yarl import URL

from fedstream.coordinator.gateway.refusals import Refusal

if TYPE_CHECKING:
    from fedstream.coordinator.gateway.certificate import ServedCertificate
    from fedstream.coordinator.gateway.settings import GatewaySettings


class OwnNames:
    """A gateway's names: its settings', or else those of the certificate it serves, with any port.

    With neither, it has whatever name it is asked by: then the proxy in front decides.
    """

    def __init__(self, settings: GatewaySettings, served: ServedCertificate | None) -> None:
        """``served``: None for plain HTTP."""
        self._names = settings.names
        self._served = served

    def of(self, host: str) -> Sequence[str]:
        """What a request may be signed for. ``host``: its header. Raises Refusal."""
        if self._names:
            return self._names
        said = host.lower().removesuffix(":443")
        if self._served is not None and not _is_for(self._served.certificate.names, said):
            raise Refusal(
                401,
                "signature",
                f"the request is for {said[:80]!r}, which is none of this gateway's names: its "
                "operator can add it to gateway.names",
            )
        return (said,)


def _is_for(names: Sequence[str], said: str) -> bool:
    """Whether a certificate of these names is for a host, which may be said with a port."""
    try:
        # As certificates have it: international names in ASCII, the one way to write an address.
        host = URL(f"https://{said}").raw_host or ""
    except ValueError:
        return False
    return host in names or f"*.{host.partition('.')[2]}" in names
