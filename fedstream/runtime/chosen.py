"""The base of settings among which a table chooses by name: strategies, solvers, policies."""

from __future__ import annotations

import sys
from inspect import get_annotations
from typing import Any, ClassVar

from pydantic import model_validator

from fedstream.runtime.config import Section


class Chosen(Section):
    """Settings with a name: the key ``kind``, or another one (``naming_key``).

    A built-in class narrows the key to its name, as a literal. A class of somebody's own, also one
    derived from a built-in class, is named by where it is defined.
    """

    naming_key: ClassVar[str] = "kind"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        tag = cls.naming_key
        inherited = cls.model_fields.get(tag)
        if tag not in get_annotations(cls) and inherited is not None and inherited.default != "":
            cls.__annotations__[tag] = str  # not its base's literal
            setattr(cls, tag, "")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, table: object) -> object:
        """Name what a program makes, without the configuration, by where its class is defined."""
        tag = cls.naming_key
        if isinstance(table, dict) and tag not in table and cls.model_fields[tag].default == "":
            return {tag: name_of(cls), **table}
        return table


def name_of(value: Any) -> str:
    """The name by which every process finds what a program defines: package.module:Name, or
    path/to/file.py:Name for a module that is in no package."""
    module, name = value.__module__, value.__qualname__
    file = getattr(sys.modules.get(module), "__file__", None)
    source = file if file is not None and "." not in module else module
    return f"{source}:{name}"
