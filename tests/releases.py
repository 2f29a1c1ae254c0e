"""Messages as the releases before and after this one write them: what a rolling update mixes."""

from __future__ import annotations

from typing import Any

import msgpack

_UNKNOWN = {"later": {"of": [1, "two", None]}, "also": 0.5, "nil": None}
_BYTES = {"bytes": b"\x00\xff"}  # never of triggers and tasks, which scripts unpack
_USERS = ("metrics", "sums", "outcomes")  # maps by names of metrics, or by reasons
# Written down again, and not asked of the messages: what a release knows does not change.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "trigger": {"why": "", "origin": "scheduler"},
    "upload": {"seconds": 0.0, "sends": "model", "site": "pool", "format": "f32"},
    "presence": {
        "owns": (),
        "leaves": False,
        "host": "",
        "pid": 0,
        "answers": 0,
        "concurrent": False,
        "failing": 0,
    },
    "give_up": {"failing": 0},
    "evaluation": {"format": "f32"},
    "measured": {"samples": 0, "sums": {}, "seconds": 0.0, "site": "pool", "trusted": False},
    "devices_evaluated": {"sums": {}, "metrics": {}},
    "heartbeat": {"answers": 0, "failing": 0},
    "close_round": {"drops": ()},
    "round_end": {"why": "", "drops": ()},
    "step_proposed": {"scores": ()},
    "set_quarantine": {"release": False, "why": ""},
    "version": {"updates": (), "format": "f32"},
    "dead": {"deliveries": 0, "data": b""},
}


def later(data: bytes) -> bytes:
    """The same from a later release: with fields that nobody here knows, in each of its maps."""
    fields = msgpack.unpackb(data)
    more = _UNKNOWN | ({} if fields["k"] in ("trigger", "task", "evaluation") else _BYTES)

    def with_more(value: Any) -> Any:
        if isinstance(value, dict):
            known = {k: v if k in _USERS else with_more(v) for k, v in value.items()}
            return known | more
        return [with_more(inner) for inner in value] if isinstance(value, list) else value

    return _packed(with_more(fields))


def earlier(data: bytes) -> bytes:
    """The same from a release that has none of the fields with defaults, where those will do."""
    fields = msgpack.unpackb(data, use_list=False)
    defaults = _DEFAULTS.get(fields["k"], {})
    return _packed(
        {n: value for n, value in fields.items() if n not in defaults or value != defaults[n]}
    )


def _packed(fields: dict[str, Any]) -> bytes:
    packed = msgpack.packb(fields, unicode_errors="replace")
    assert isinstance(packed, bytes)
    return packed
