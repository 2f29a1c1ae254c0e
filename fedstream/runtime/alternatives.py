"""A table whose kind is chosen by name, among built-in ones and plug-ins.

    strategy: Annotated[Strategy, OneOf(RULES, tag="name")]

The tag is looked up through the door, and the table is validated by the settings class found there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema, to_json

from fedstream.broker.errors import ConfigError
from fedstream.runtime.plugins import Door, NotTrusted

# In a validation's context: the values come from a recording, so programs need its user's consent.
RECORDED = {"recorded": True}


@dataclass(frozen=True)
class OneOf:
    """Annotation of a settings class: its value is one of the door's classes, by the key ``tag``.

    The base class must declare ``tag`` as a string; built-in classes narrow it to a literal.
    """

    door: Door[Any]
    tag: str = "kind"

    def __get_pydantic_core_schema__(
        self, base: type[BaseModel], _handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def chosen(value: object, info: ValidationInfo) -> BaseModel:
            if isinstance(value, base):
                return value
            if not isinstance(value, dict):
                raise PydanticCustomError("model_type", "Input should be a valid table")
            recorded = bool(info.context and info.context.get("recorded"))
            model, name = self._found(value, recorded)
            table = {**value, self.tag: name}
            if info.mode == "json" or recorded:  # where a list may stand for a tuple
                return model.model_validate_json(to_json(table), context=info.context)
            return model.model_validate(table, context=info.context)

        return core_schema.with_info_plain_validator_function(chosen)

    def __get_pydantic_json_schema__(
        self, _schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The built-in ones: what else there may be can't be known."""
        models = self.door.built_in.values()
        return {"anyOf": [handler(model.__pydantic_core_schema__) for model in models]}

    def _found(self, table: dict[str, Any], recorded: bool) -> tuple[type[BaseModel], str]:
        """The table's class, and its full name. Raises PydanticCustomError."""
        tag = table.get(self.tag)
        about = {"discriminator": repr(self.tag)}
        if tag is None:
            raise PydanticCustomError("union_tag_not_found", "the kind is not given", about)
        about["tag"] = tag
        if not isinstance(tag, str):
            raise PydanticCustomError("plugin", "must be a name, as text", about)
        try:
            found = self.door.find(tag, recorded=recorded)
        except NotTrusted:
            raise
        except ConfigError as error:
            raise PydanticCustomError("plugin", "{why}", about | {"why": str(error)}) from error
        declared = found.value.model_fields[self.tag].annotation
        if get_origin(declared) is Literal and found.name not in get_args(declared):
            whose = f"leave out the field {self.tag} of {found.value.__name__}"
            why = f"{whose}: your own class needs none"
            raise PydanticCustomError("plugin", "{why}", about | {"why": why})
        return found.value, found.name

    def models(self, *tags: object, recorded: bool = False) -> list[type[BaseModel]]:
        """The classes of these tags; where none is known, the built-in ones."""
        known = [self.door.known(tag, recorded=recorded) for tag in tags]
        named = [model for model in known if model is not None]
        return named or list(self.door.built_in.values())
