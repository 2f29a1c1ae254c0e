"""The protocol as an OpenAPI document (3.1), served at ``/v1/openapi.json``."""

from __future__ import annotations

from typing import Any, Final

from fedstream.coordinator.gateway.refusals import REFUSALS
from fedstream.core.digest import DIGEST_PATTERN
from fedstream.protocol.messages import (
    ATTEMPT_ID,
    CHANGES_ROUTE,
    CHECK_IN_ROUTE,
    ENROL_ROUTE,
    GIVE_UP_ROUTE,
    HEARTBEAT_ROUTE,
    MEASUREMENT_ROUTE,
    MODEL_ROUTE,
    OPENAPI_ROUTE,
    TOKEN_ROUTE,
    UPDATE_ROUTE,
    schemas,
)

_JSON: Final = "application/json"
_TASK: Final = {
    "name": "task",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
}
_ATTEMPT: Final = {
    "name": "attempt",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": f"^{ATTEMPT_ID}$"},
}
_DIGEST: Final = {
    "name": "digest",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": f"^{DIGEST_PATTERN}$"},
}
_HAS: Final = {**_DIGEST, "name": "has"}


def _body(*schemas: str) -> dict[str, Any]:
    named = [{"$ref": f"#/components/schemas/{schema}"} for schema in schemas]
    return {_JSON: {"schema": named[0] if len(named) == 1 else {"anyOf": named}}}


def _says(about: str, schema: str | None = None, *headers: str) -> dict[str, Any]:
    said: dict[str, Any] = {"description": about}
    if schema is not None:
        said["content"] = _body(schema)
    if headers:
        said["headers"] = {name: {"schema": {"type": "string"}} for name in headers}
    return said


def _asks(schema: str) -> dict[str, Any]:
    return {"required": True, "content": _body(schema)}


def _header(name: str, *, required: bool = False) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": required, "schema": {"type": "string"}}


_PROBLEMS: Final = {"default": _says("refused; `reason` is one of a closed set", "Problem")}
_SIGNED: Final[dict[str, Any]] = {
    "security": [],
    "parameters": [
        _header(name, required=True) for name in ("Content-Digest", "Signature-Input", "Signature")
    ],
}
_BYTES: Final = {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}
_RECEIPTS: Final = {
    "200": _says("the whole update has arrived, and was admitted", "Receipt"),
    "202": _says("it has arrived, and nobody has decided yet: repeat the request", "Receipt"),
    "422": _says("it has arrived, and was refused, or its task is given up", "Receipt"),
    "409": {
        **_says("a part from elsewhere, or a newer request has taken over", None, "Upload-Offset"),
        "content": {"application/problem+json": _body("WrongOffset")[_JSON], **_body("Problem")},
    },
}
_PROGRESS: Final = ("Upload-Offset", "Upload-Complete", "Upload-Length", "Upload-Limit")
_MODEL: Final[dict[str, Any]] = {
    "parameters": [
        _DIGEST,
        *(_header(name) for name in ("Range", "If-Range", "If-None-Match")),
    ],
    "responses": {
        "200": {**_says("the model", None, "ETag", "Fedstream-Format"), **_BYTES},
        "206": {**_says("a part of it", None, "ETag", "Content-Range"), **_BYTES},
        "304": _says("the device has it"),
        "404": _says("it is not among the newest: check in again", "Problem"),
        "416": _says("no such bytes", "Problem", "Content-Range"),
        **_PROBLEMS,
    },
}
_CHANGES: Final[dict[str, Any]] = {
    "parameters": [_HAS, *_MODEL["parameters"]],
    "responses": {
        **_MODEL["responses"],
        "200": {
            **_says("a Zstandard frame with what changed", None, "ETag", "Fedstream-Format"),
            **_BYTES,
        },
        "404": _says("`no changes` that are smaller, or the model is `superseded`", "Problem"),
    },
}
_PATHS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    ENROL_ROUTE: {
        "post": {
            "summary": "Enrol: an invite and a public key become a device's number",
            **_SIGNED,
            "requestBody": _asks("Enrolment"),
            "responses": {
                "201": _says("enrolled", "Enrolled"),
                "200": _says("enrolled before, with the same invite and key", "Enrolled"),
                **_PROBLEMS,
            },
        }
    },
    TOKEN_ROUTE: {
        "post": {
            "summary": "Get a token, which all other requests show",
            **_SIGNED,
            "requestBody": _asks("Nothing"),
            "responses": {"200": _says("a token", "Access"), **_PROBLEMS},
        }
    },
    CHECK_IN_ROUTE: {
        "post": {
            "summary": "Ask for a task, and wait for one",
            "requestBody": _asks("CheckIn"),
            "responses": {
                "200": {
                    **_says("a task; an evaluation only if the device said `evaluates`"),
                    "content": _body("Offer", "EvaluationOffer"),
                },
                "204": _says("none: check in again after Retry-After", None, "Retry-After"),
                "410": _says("the run is finished", "Problem"),
                **_PROBLEMS,
            },
        }
    },
    MODEL_ROUTE: {
        "get": {"summary": "Download a model, or a part of it", **_MODEL},
        "head": {"summary": "Ask how large a model is", **_MODEL},
    },
    CHANGES_ROUTE: {
        "get": {"summary": "Download what changed since the model `has`", **_CHANGES},
        "head": {"summary": "Ask how large the changes are", **_CHANGES},
    },
    HEARTBEAT_ROUTE: {
        "post": {
            "summary": "Say that the device still works on a task",
            "parameters": [_TASK],
            "requestBody": _asks("Beat"),
            "responses": {"200": _says("whether to go on", "Advice"), **_PROBLEMS},
        }
    },
    GIVE_UP_ROUTE: {
        "post": {
            "summary": "Say that the device will not finish a task",
            "parameters": [_TASK],
            "requestBody": _asks("Surrender"),
            "responses": {"200": _says("given up, now or before", "Nothing"), **_PROBLEMS},
        }
    },
    MEASUREMENT_ROUTE: {
        "post": {
            "summary": "Answer an evaluation with the metrics on the device's test data",
            "parameters": [_TASK, _ATTEMPT],
            "requestBody": _asks("MetricsReport"),
            "responses": {
                "200": _says("taken, now or before", "Nothing"),
                "404": _says("the evaluation is over", "Problem"),
                **_PROBLEMS,
            },
        }
    },
    UPDATE_ROUTE: {
        "post": {
            "summary": "Begin to upload an update: none of it, a first part, or all",
            "parameters": [
                _TASK,
                _ATTEMPT,
                _header("Upload-Length"),
                _header("Upload-Complete", required=True),
                _header("Update-Report", required=True),
            ],
            "requestBody": _BYTES,
            "responses": {
                "201": _says("begun", None, "Location", *_PROGRESS),
                **_RECEIPTS,
                **_PROBLEMS,
            },
        },
        "head": {
            "summary": "Ask how much of an upload has arrived",
            "parameters": [_TASK, _ATTEMPT],
            "responses": {
                "204": _says("so much", None, *_PROGRESS),
                "410": _says("the upload is over: its end, sent again, gets the receipt"),
                **_PROBLEMS,
            },
        },
        "delete": {
            "summary": "Forget what has arrived; the task stays open",
            "parameters": [_TASK, _ATTEMPT],
            "responses": {"204": _says("forgotten"), **_PROBLEMS},
        },
        "patch": {
            "summary": "Go on with an upload",
            "parameters": [
                _TASK,
                _ATTEMPT,
                _header("Upload-Offset", required=True),
                _header("Upload-Complete", required=True),
            ],
            "requestBody": {
                "content": {"application/partial-upload": {"schema": {"type": "string"}}}
            },
            "responses": {
                "204": _says("arrived; more is to come", None, "Upload-Offset", "Upload-Complete"),
                **_RECEIPTS,
                **_PROBLEMS,
            },
        },
    },
    OPENAPI_ROUTE: {
        "get": {
            "summary": "Read this document",
            "security": [],
            "responses": {"200": _says("this document"), **_PROBLEMS},
        }
    },
}


def document() -> dict[str, Any]:
    """The whole document."""
    found = schemas()
    found["Problem"]["properties"]["reason"]["enum"] = list(REFUSALS)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "fedstream gateway",
            "version": "1",
            "description": "How devices outside the cluster take part in a run.",
        },
        "paths": _PATHS,
        "components": {
            "schemas": found,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}
            },
        },
        "security": [{"token": []}],
    }
