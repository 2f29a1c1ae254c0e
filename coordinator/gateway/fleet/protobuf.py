"""The part of Flower's protobuf messages that supernodes and gateways need.

Names and numbers are those of the Fleet API in Flower 1.40 to 1.42 (package ``flwr.proto``);
protobuf skips fields that are not described here. All fields are optional in the sense of proto2,
so a field set to zero is sent, as Flower requires in a ``oneof``.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from fedstream.coordinator.gateway.refusals import Refusal

# Releases whose supernodes tests/flower runs against a gateway.
TESTED: Final = ("1.40", "1.41", "1.42")
CONTENT_TYPE: Final = "application/protobuf"

_PACKAGE = "fedstream.flower"
# Number, type and name of each field; ``*`` marks a repeated one.
_FIELDS: Final = {
    "Node": "1 uint64 node_id",
    "Error": "1 sint64 code, 2 string reason",
    "Metadata": "1 uint64 run_id, 2 string message_id, 3 uint64 src_node_id, 4 uint64 dst_node_id, "
    "5 string reply_to_message_id, 6 string group_id, 7 double ttl, 8 string message_type, "
    "9 double created_at",
    "Message": "1 Metadata metadata, 2 Nothing content, 3 Error error",
    "ObjectTree": "1 string object_id, 2 ObjectTree *children",
    "RegisterNodeRequest": "1 bytes public_key",
    "ActivateNodeRequest": "1 bytes public_key",
    "NodeResponse": "1 uint64 node_id",
    "LeaveRequest": "1 uint64 node_id",
    "HeartbeatRequest": "1 Node node",
    "HeartbeatResponse": "1 bool success",
    "PullMessagesRequest": "1 Node node",
    "PullMessagesResponse": "2 Message *messages_list, 3 ObjectTree *message_object_trees",
    "PushMessagesRequest": "1 Node node, 2 Message *messages_list, "
    "3 ObjectTree *message_object_trees, 4 double *clientapp_runtime_list",
    "PushMessagesResponse": "3 string *objects_to_push, 4 string session_id",
    "RunStatus": "1 string status",
    "Run": "1 uint64 run_id, 2 string fab_id, 3 string fab_version, 5 string fab_hash, "
    "10 RunStatus status, 16 string primary_task_type, 18 uint64 series_id",
    "GetRunRequest": "1 Node node, 2 uint64 run_id",
    "GetRunResponse": "1 Run run",
    "Fab": "1 string hash_str, 2 bytes content",
    "GetFabRequest": "1 Node node, 2 string hash_str",
    "GetFabResponse": "1 Fab fab",
    "PullObjectRequest": "1 Node node, 2 uint64 run_id, 3 string object_id",
    "PullObjectResponse": "1 bool object_found, 2 bool object_available, 3 bytes object_content",
    "PushObjectRequest": "1 Node node, 2 uint64 run_id, 3 string object_id, "
    "4 bytes object_content, 5 string session_id",
    "PushObjectResponse": "1 bool stored",
    "ConfirmMessageReceivedRequest": "1 Node node, 3 string message_object_id",
    "Nothing": "",
    # The bodies of objects. A MetricRecord is a ConfigRecord with only numbers.
    "Value": "1 double double, 2 sint64 sint64, 3 uint64 uint64, 4 bool bool, 5 string string",
    "Item": "1 string key, 2 Value value",
    "Values": "1 Item *items",
}


def _made() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="fedstream/flower.proto", package=_PACKAGE, syntax="proto2"
    )
    described = descriptor_pb2.FieldDescriptorProto
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field in filter(None, fields.split(", ")):
            number, kind, label = field.split()
            is_many = label.startswith("*")
            one = message.field.add(
                name=label.removeprefix("*"),
                number=int(number),
                label=described.LABEL_REPEATED if is_many else described.LABEL_OPTIONAL,
            )
            if kind in _FIELDS:
                one.type, one.type_name = described.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                one.type = described.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _FIELDS
    }


_CLASSES = _made()


def message(name: str, **fields: Any) -> Any:
    """Make a message of this name."""
    return _CLASSES[name](**fields)


def parsed(name: str, data: bytes | memoryview) -> Any:
    """Parse a received message. Raises Refusal (400) if it is invalid."""
    try:
        return _CLASSES[name].FromString(bytes(data))
    except DecodeError as error:
        raise Refusal(400, "malformed", f"no {name} of Flower's: {error}") from error
