"""JSON bodies and headers: what both ends agree on, and what neither lets through."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstream.core.messages import task_id
from fedstream.protocol import headers, messages
from fedstream.protocol.messages import (
    BODIES,
    BODY,
    Advice,
    BadBody,
    Body,
    CheckIn,
    EvaluationOffer,
    MetricsReport,
    Offer,
    Surrender,
    UpdateReport,
    WrongOffset,
)

DIGEST = "ab" * 32
OFFER: dict[str, Any] = {
    "task": {
        "id": task_id(1_763_884_800_000),
        "device": 17,
        "seed": (1 << 63) - 1,
        "steps": 10,
        "epochs": None,
        "seconds": None,
        "left_s": None,
    },
    "attempt": "0123456789ab",
    "model": {
        "version": 3,
        "digest": DIGEST,
        "size": 1000,
        "format": "int8+zstd",
        "url": f"/v1/models/{DIGEST}",
        "changes": None,
    },
    "unshared": {
        "version": 0,
        "digest": DIGEST,
        "size": 4000,
        "format": "f32",
        "url": f"/v1/models/{DIGEST}",
        "changes": None,
    },
    "update": {
        "url": "/v1/tasks/t/updates/0123456789ab",
        "sends": "delta",
        "format": "topk:0.1",
        "layout": DIGEST,
        "most": 2000,
    },
    "private": {"policy": DIGEST, "run": "lineage", "key": "AAECAw=="},
    "heartbeat_s": 5.0,
}
CHECK_IN: dict[str, Any] = {
    "nonce": "n" * 22,
    "eligible": True,
    "wait_s": 50,
    "formats": ["f32"],
    "has": None,
    "layout": DIGEST,
    "devices": 10,
    "evaluates": True,
}
EVALUATION: dict[str, Any] = {
    "task": {"id": OFFER["task"]["id"], "device": 17, "left_s": 30.5},
    "attempt": "0123456789ab",
    "model": OFFER["model"],
    "unshared": OFFER["unshared"],
    "measurement": {"url": "/v1/tasks/t/measurements/0123456789ab", "layout": DIGEST},
    "heartbeat_s": 5.0,
}
MEASUREMENT: dict[str, Any] = {
    "samples": 10,
    "sums": {"accuracy": [7.0, 10.0], "loss": [-3.5, 0.5]},
    "seconds": 1.5,
}
REPORT: dict[str, Any] = {
    "digest": DIGEST,
    "samples": 5,
    "steps": 10,
    "lr": 0.1,
    "loss": None,
    "seconds": 1.5,
    "tau": 3,
    "base": DIGEST,
    "layout": DIGEST,
    "format": "f32",
    "sealed": "AAECAw==",
}
SAMPLES: dict[str, dict[str, Any]] = {
    "Nothing": {},
    "Problem": {"error": "too old", "reason": "clock"},
    "Attestation": {"format": "tpm2.0", "data": "AAECAw=="},
    "Enrolment": {
        "invite": "i" * 32,
        "public_key": "-----BEGIN PUBLIC KEY-----",
        "attestation": None,
    },
    "Enrolled": {"device": 17, "run": "demo"},
    "Access": {"token": "a.b.c", "expires_in": 600},
    "CheckIn": CHECK_IN,
    "Offer": OFFER,
    "EvaluationOffer": EVALUATION,
    "Beat": {"attempt": "0123456789ab"},
    "Advice": {"go_on": False, "why": "too stale"},
    "Surrender": {"attempt": "0123456789ab", "reason": "raised ValueError"},
    "UpdateReport": REPORT,
    "Receipt": {"state": "refused", "reason": "too stale"},
    "MetricsReport": MEASUREMENT,
    "WrongOffset": {
        "type": "https://iana.org/assignments/http-problem-types#mismatching-upload-offset",
        "title": "offset from request does not match offset of resource",
        "expected-offset": 100,
        "provided-offset": 0,
    },
}


@pytest.mark.parametrize("body", BODIES)
def test_a_message_is_read_as_it_was_written(body: type[Body]) -> None:
    sample = SAMPLES[body.__name__]
    message = body.decode(json.dumps(sample))
    assert json.loads(message.encode()) == sample
    assert body.decode(message.encode()) == message


@pytest.mark.parametrize("body", BODIES)
def test_fields_of_later_releases_are_ignored(body: type[Body]) -> None:
    sample = SAMPLES[body.__name__]
    assert body.decode(json.dumps({**sample, "later": [1]})) == body.decode(json.dumps(sample))


@pytest.mark.parametrize("body", BODIES)
def test_schemas_describe_the_messages(body: type[Body]) -> None:
    """For OpenAPI, whose readers know nothing of pydantic."""
    defs = {"components": {"schemas": messages.schemas()}}
    schema = {**defs, "$ref": f"#/components/schemas/{body.__name__}"}
    jsonschema.validate(SAMPLES[body.__name__], schema)
    if SAMPLES[body.__name__]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate([], schema)


@pytest.mark.parametrize(
    ("body", "wrong", "where"),
    [
        (CheckIn, {"wait_s": 51}, "wait_s"),
        (CheckIn, {"wait_s": float("nan")}, "wait_s"),
        (CheckIn, {"eligible": 1}, "eligible"),
        (CheckIn, {"nonce": "n" * 21 + "\n"}, "nonce"),
        (CheckIn, {"formats": ["f32"] * 17}, "formats"),
        (CheckIn, {"formats": ["../f32"]}, "formats.0"),
        (CheckIn, {"has": DIGEST.upper()}, "has"),
        (UpdateReport, {"samples": -1}, "samples"),
        (UpdateReport, {"steps": 1 << 53}, "steps"),
        (UpdateReport, {"lr": float("inf")}, "lr"),
        (UpdateReport, {"digest": DIGEST + "0"}, "digest"),
        (UpdateReport, {"base": ""}, "base"),
        (Surrender, {"reason": "raised my hand"}, "reason"),
        (EvaluationOffer, {"measurement": {"url": "/x"}}, "measurement.layout"),
        (MetricsReport, {"sums": {}}, "sums"),
        (MetricsReport, {"sums": {"": [1.0, 1.0]}}, "sums"),
        (MetricsReport, {"sums": {"loss": [1.0, 0.0]}}, "sums.loss"),
        (MetricsReport, {"sums": {"loss": [1.0, 1e-31]}}, "sums.loss"),
        (MetricsReport, {"sums": {"loss": [-1.1e30, 1.0]}}, "sums.loss"),
        (MetricsReport, {"sums": {"loss": [float("nan"), 1.0]}}, "sums.loss"),
        (MetricsReport, {"sums": {"loss": [1.0, 1.0, 1.0]}}, "sums.loss"),
        (MetricsReport, {"sums": {f"m{n}": [1.0, 1.0] for n in range(101)}}, "sums"),
        (Surrender, {"attempt": "../../../x"}, "attempt"),
        (UpdateReport, {"sealed": "AAE"}, "sealed"),
        (UpdateReport, {"sealed": "AAAA" * 1367}, "sealed"),
        (Offer, {"private": {"policy": DIGEST, "run": "", "key": ""}}, "private.run"),
        (Offer, {"private": {"policy": "none", "run": "r", "key": ""}}, "private.policy"),
        (Offer, {"attempt": 123456789012}, "attempt"),
        (Offer, {"task": {**OFFER["task"], "id": "a/b"}}, "task.id"),
        (Offer, {"model": {**OFFER["model"], "url": "https://elsewhere/"}}, "model.url"),
        (Advice, {"go_on": True}, "why must give the reason to stop"),
        (Advice, {"why": None}, "why must give the reason to stop"),
    ],
)
def test_what_is_out_of_bounds_is_refused(
    body: type[Body], wrong: dict[str, Any], where: str
) -> None:
    """The error names the field, and does not repeat what was sent."""
    with pytest.raises(BadBody, match=where):
        body.decode(json.dumps({**SAMPLES[body.__name__], **wrong}))


def test_offer_is_read_as_what_it_is() -> None:
    assert messages.offered(json.dumps(OFFER).encode()) == Offer.decode(json.dumps(OFFER))
    found = messages.offered(json.dumps(EVALUATION).encode())
    assert found == EvaluationOffer.decode(json.dumps(EVALUATION))
    with pytest.raises(BadBody, match=r"measurement\.layout"):
        messages.offered(json.dumps({**EVALUATION, "measurement": {"url": "/x"}}).encode())


def test_long_and_deep_bodies_are_refused() -> None:
    with pytest.raises(BadBody, match="at most 65536"):
        CheckIn.decode(b" " * (BODY + 1))
    for wrong in (b"[" * BODY, b"", b"\xff\xfe", b"null", b"{" * 9):
        with pytest.raises(BadBody):
            CheckIn.decode(wrong)


def test_a_body_is_ascii() -> None:
    """So that a report fits into a header."""
    problem = messages.Problem(error="h\u00f6chstens \u2014 60 s", reason="clock")
    assert problem.encode().isascii()
    assert messages.Problem.decode(problem.encode()) == problem


def test_an_offset_that_does_not_fit_has_the_drafts_names() -> None:
    assert json.loads(WrongOffset(expected=100, provided=0).encode()) == SAMPLES["WrongOffset"]


# headers


@given(st.integers(0, 10**15 - 1))
def test_numbers_of_bytes_survive_their_header(value: int) -> None:
    assert headers.integer("Upload-Length", str(value)) == value
    assert headers.limits(f"max-size={value}") == {"max-size": value}


@pytest.mark.parametrize(
    "value", ["", "-1", "+1", "1.0", "01", "1_000", " 1", "1\n", "\u0661", "1" * 16, "0x10"]
)
def test_what_is_no_number_of_bytes_is_refused(value: str) -> None:
    """Python's int would take most of these."""
    with pytest.raises(headers.BadHeader, match="Upload-Offset"):
        headers.integer("Upload-Offset", value)
    with pytest.raises(headers.BadHeader):
        headers.limits(f"max-size={value}")


def test_limits_of_uploads_come_in_any_order() -> None:
    """And may be such as were not known when a device was made."""
    about = {headers.LEAST_PART: 7, headers.MOST: 9, "max-of-tomorrow": 1}
    assert headers.limits(headers.as_limits(about)) == about
    assert headers.limits("max-size=9,max-age=3 ,  b=0") == {"max-size": 9, "max-age": 3, "b": 0}
    for wrong in ("max-size", "max-size=9;", "max-size=9,", "=9", "Max=9", "max-size=?1"):
        with pytest.raises(headers.BadHeader, match="Upload-Limit"):
            headers.limits(wrong)


def test_booleans_are_structured_fields() -> None:
    for value in (True, False):
        assert headers.boolean("Upload-Complete", headers.as_boolean(value)) is value
    for wrong in ("", "1", "true", "?2", "?1 "):
        with pytest.raises(headers.BadHeader, match="Upload-Complete"):
            headers.boolean("Upload-Complete", wrong)


def test_a_token_is_found_in_its_header_only() -> None:
    assert headers.bearer(headers.as_bearer("a.b-_.c")) == "a.b-_.c"
    for wrong in (
        "",
        "a.b.c",
        "bearer a.b.c",
        "Bearer  a.b.c",
        "Bearer a.b",
        "Basic a.b.c",
        "Bearer a.b.c\n",
        "Bearer a.b." + "c" * 1000,
    ):
        with pytest.raises(headers.BadHeader, match="Authorization"):
            headers.bearer(wrong)
