"""Configuration: one TOML file, overridden by the environment, overridden by ``--set``.

``load`` merges the three layers and validates the result once against a pydantic model. All errors
are reported together, one line per key, each with the value, its source and what is allowed.
``dump`` writes resolved settings back as TOML.

A user's program declares its keys where it uses their values: the typed parameters of a function
become keys, and the values are checked as strictly as all others.

    def task(hidden: int = 64, activation: Literal["relu", "tanh"] = "relu") -> Task: ...
"""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
import warnings
from dataclasses import dataclass
from inspect import get_annotations
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeGuard,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic.errors import PydanticUserError
from pydantic_core import to_json

from fedstream.core.errors import ConfigError
from fedstream.runtime.plugins import NotTrusted, OneOf, allowed, runs_program
from fedstream.runtime.text import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

M = TypeVar("M", bound=BaseModel)

Positive = Annotated[float, Field(gt=0)]

_PREFIX = "FEDSTREAM_"
_TAGS = ("kind", "name")  # fields that select between alternative tables
_ITEMS = ""  # in a table that adds items to a list: the key of that list
_SHOWN = 80  # characters of an invalid value that a message shows


class Section(BaseModel):
    """Base of every configuration section: frozen, strict, no unknown keys, only finite numbers.

    Strict: ``"1"`` is not ``1`` and ``1.0`` is not an integer; an integer may stand for a float.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )


class Option(NamedTuple):
    """A configuration key set by its own command-line option."""

    name: str  # as typed: --versions
    key: str  # run.versions
    value: object


@dataclass
class _Leaf:
    """A value, its source, and the text it was written as (environment and --set only)."""

    value: object
    source: str
    text: str | None = None


_Tree: TypeAlias = "dict[str, _Tree | _Leaf]"


def load(
    schema: type[M],
    *,
    path: Path | None,
    environ: Mapping[str, str],
    sets: Sequence[str] = (),
    options: Sequence[Option] = (),
    trusted: bool = True,
    keys: Collection[str] | None = None,
) -> M:
    """Read and validate the settings; later layers win: file, environment, ``a.b.c=value`` sets.

    ``options`` are keys with their own command-line option; they override the sets.

    ``FEDSTREAM_<SECTION>__<KEY>`` sets a configuration key, at any depth; names without a double
    underscore are ignored (Kubernetes sets ``FEDSTREAM_<SERVICE>_PORT`` and the like). A key below
    a list adds an item to it: ``FEDSTREAM_COORDINATOR__SITES__A=site-a``, in the order of the
    names. Values from environment and sets are parsed as TOML, or else taken as strings. A layer
    that changes the ``kind`` or ``name`` of a table with alternatives drops the keys that earlier
    layers set in it: they belonged to the other kind.

    ``trusted`` is false for the file of a recording: a plug-in that the file alone names is not
    loaded, because that would run its program. ``keys``: the tables and the keys, such as
    ``run.name``, to read from the file and the environment; None: all.

    Raises ConfigError, with one line for every invalid key; NotTrusted.
    """
    tree: _Tree = {}
    try:
        file, environment = _from_file(path), _from_environment(environ)
        if keys is not None:
            file, environment = (_only(one, keys, schema) for one in (file, environment))
        for layer in (file, environment, _from_sets(sets, options)):
            tree = _merge(tree, layer, [schema], recorded=not trusted)
        if not trusted:
            _check_trusted(tree, [schema], str(path), ())
        return _validate(schema, tree)
    except RecursionError:  # in the TOML parser or our code; valid keys are a few levels deep
        raise ConfigError("configuration: a key or a value is nested too deeply") from None


def check(schema: type[M], table: Mapping[str, object], at: str) -> M:
    """Validate the table at the key ``at``, which ``load`` accepted unchecked.

    This is for tables whose schema comes from a user's program. Raises ConfigError as ``load``
    does, but without the values' sources.
    """
    tree: _Tree = {key: _node(value, "") for key, value in table.items()}
    return _validate(schema, tree, at.split("."))


def dump(settings: BaseModel) -> str:
    """Settings as TOML text; loading it gives equal settings, except for secrets.

    Secrets are left out, and so is None, which TOML lacks.
    """
    return tomli_w.dumps(settings.model_dump(mode="json", exclude_none=True))


# Layers: each is a tree whose leaves know their source.


def _from_file(path: Path | None) -> _Tree:
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # TOMLDecodeError (names the line) or UnicodeDecodeError
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return {key: _node(value, str(path)) for key, value in table.items()}


def _from_environment(environ: Mapping[str, str]) -> _Tree:
    tree: _Tree = {}
    ours = (name for name in environ if name.startswith(_PREFIX))
    names = [name for name in ours if "__" in name.removeprefix(_PREFIX)]
    # The environment has no order: tables first, then the keys inside them.
    for name in sorted(names, key=lambda name: (name.count("__"), name)):
        _check_text(name, name)
        keys = name.removeprefix(_PREFIX).lower().split("__")
        _put(tree, keys, _parse(environ[name], name))
    return tree


def _from_sets(sets: Iterable[str], options: Iterable[Option]) -> _Tree:
    tree: _Tree = {}
    for item in sets:
        _check_text(item, "--set")
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {item}: expected key=value, as in --set strategy.alpha=0.3")
        _put(tree, key.strip().split("."), _parse(text, "--set"))
    for option in options:
        if isinstance(option.value, str):
            _check_text(option.value, option.name)
        _put(tree, option.key.split("."), _node(option.value, option.name))
    return tree


def _parse(text: str, source: str) -> _Tree | _Leaf:
    """Parse one TOML value; anything else is a string."""
    _check_text(text, source)
    try:
        table = tomllib.loads(f"value = {text}")
    except ValueError:  # TOMLDecodeError, or an integer of thousands of digits
        return _Leaf(text, source)
    if len(table) > 1:  # line breaks in the text: more than one value
        return _Leaf(text, source)
    return _node(table["value"], source, text)


def _check_text(text: str, source: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):  # undecodable bytes
        shown = source.encode(errors="backslashreplace").decode()
        raise ConfigError(f"{shown}: not valid UTF-8")


def _node(value: object, source: str, text: str | None = None) -> _Tree | _Leaf:
    if isinstance(value, dict):
        return {key: _node(inner, source) for key, inner in value.items()}
    return _Leaf(value, source, text)


def _only(tree: _Tree, keys: Collection[str], schema: type[BaseModel]) -> _Tree:
    """The tree with these keys only, plus tables unknown to the schema, which are errors."""
    left: _Tree = {name: node for name, node in tree.items() if name not in schema.model_fields}
    for key in keys:
        parts = key.split(".")
        if (node := _find(tree, parts)) is not None:
            _put(left, parts, node)
    return left


def _put(tree: _Tree, keys: Sequence[str], node: _Tree | _Leaf) -> None:
    for key in keys[:-1]:
        below = tree.get(key)
        if not isinstance(below, dict):
            below = tree[key] = _items(below)
        tree = below
    tree[keys[-1]] = node


def _merge(below: _Tree, above: _Tree, types: list[object], *, recorded: bool) -> _Tree:
    if _has_alternatives(types) and any(_differs(below.get(tag), above.get(tag)) for tag in _TAGS):
        return above
    merged = dict(below)
    types = _resolved(types, below, above, recorded=recorded)
    for key, node in above.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(node, dict):
            node = _merge(old, node, _inside(types, key), recorded=recorded)
        elif isinstance(node, dict):
            node = _items(old) | node
        merged[key] = node
    return merged


def _items(node: _Tree | _Leaf | None) -> _Tree:
    """Return the table that appends to the list ``node``; an empty table for any other node."""
    return {_ITEMS: node} if isinstance(node, _Leaf) and isinstance(node.value, list) else {}


def _check_trusted(
    node: _Tree | _Leaf, types: list[object], source: str, key: tuple[str | int, ...]
) -> None:
    """Raise NotTrusted if a value from ``source`` names a plug-in that would run a program."""
    if isinstance(node, _Leaf):
        if node.source == source and isinstance(node.value, list):
            for number, item in enumerate(node.value):
                inner = _inside(types, number)
                _check_trusted(_node(item, source), inner, source, (*key, number))
        return
    for one in types:
        leaf = node.get(one.tag) if isinstance(one, OneOf) else None
        if isinstance(one, OneOf) and isinstance(leaf, _Leaf) and leaf.source == source:
            value = leaf.value
            if isinstance(value, str) and runs_program(value) and not allowed().recorded:
                where = _dotted([*key, one.tag])
                raise NotTrusted(
                    f"{source} names the {one.registry.what} {value!r}, and loading it runs its "
                    f"code: choose {where} yourself, or give --trust-recorded-code if you trust "
                    "this one"
                )
    known = _resolved(types, node)
    for name, below in node.items():
        inner = types if name == _ITEMS else _inside(known, name)
        _check_trusted(below, inner, source, (*key, name))


def _differs(old: _Tree | _Leaf | None, new: _Tree | _Leaf | None) -> bool:
    return isinstance(old, _Leaf) and isinstance(new, _Leaf) and old.value != new.value


_MOST_PLACES = 3  # of a key that is unknown where it stands, to suggest
_MOST_WRONG = 20  # wrong keys in an error, as each needs a look-up

# Validation, by way of JSON: from JSON, pydantic's strict mode accepts a list for a tuple and a
# string for a path; from Python values it does not.


def _validate(schema: type[M], tree: _Tree, at: Sequence[str] = ()) -> M:
    """Validate the tree, which is the table at the key ``at``."""
    try:
        return schema.model_validate_json(to_json(_plain(tree)))
    except ValidationError as error:
        wrong = [_Wrong(schema, tree, one, at) for one in error.errors(include_url=False)]
        if any([item.is_mended() for item in wrong]):  # noqa: C419
            return _validate(schema, tree, at)
        lines: dict[str, list[str]] = {}
        left: set[str] = set()
        for item in wrong:  # the alternatives of a union each complain about the same key
            given = item.given()
            if given in lines or len(lines) < _MOST_WRONG:
                lines.setdefault(given, []).append(item.expected())
            else:
                left.add(given)
        message = [
            f"{given}: {' or '.join(dict.fromkeys(expected))}" for given, expected in lines.items()
        ]
        if left:
            message.append(f"and {len(left)} more")
        raise ConfigError("\n".join(message)) from None  # pydantic's own says the same again


def _plain(node: _Tree | _Leaf) -> object:
    if isinstance(node, _Leaf):
        return node.value
    return {key: _plain(inner) for key, inner in node.items()}


class _Wrong:
    """A pydantic error, expressed in the user's keys."""

    def __init__(
        self, schema: type[BaseModel], tree: _Tree, details: ErrorDetails, at: Sequence[str]
    ) -> None:
        self.schema = schema
        self.details = details
        self.tree = tree
        self.at = at
        self.key: list[str | int] = []
        self.types: list[object] = [schema]  # the key's possible types
        self.holder: list[object] = []  # possible types of the enclosing table
        kinds: list[object] = self.types  # of the key, before the table's kind is considered
        self.around: list[object] = []  # all kinds of the enclosing table
        for part in details["loc"]:
            if isinstance(part, str) and len(self.types) > 1:  # not a key: names an alternative
                self.types = [one for one in self.types if part in _labels(one)] or self.types
            else:
                self.holder = _resolved(self.types, _find(tree, self.key))
                self.around = _resolved(kinds)
                self.types = kinds = _inside(self.holder, part)
                self.key.append(part)
        if "discriminator" in details.get("ctx", {}):
            self.key.append(details["ctx"]["discriminator"].strip("'"))
        self.node = _find(tree, self.key)

    def is_mended(self) -> bool:
        """Convert the value to the intended one if possible; return whether it was converted."""
        return self.becomes_list() or self.becomes_text() or self.becomes_default()

    def becomes_list(self) -> bool:
        """Make a list of a table that adds items to it; return whether it did so."""
        table, holder = self.node, _find(self.tree, self.key[:-1])
        if self.details["type"] not in ("list_type", "tuple_type") or not isinstance(table, dict):
            return False
        assert isinstance(holder, dict)  # noqa: S101  (a table is in a table)
        key = str(self.key[-1])
        items: Any
        if _ITEMS in table:
            items = _plain(table.pop(_ITEMS))
        else:
            models = [one for one in self.holder if _is_model(one) and key in one.model_fields]
            items = models[0].model_fields[key].get_default(call_default_factory=True)
        added = [_plain(table[name]) for name in sorted(table)]
        holder[key] = _Leaf([*(items or ()), *added], ", ".join(dict.fromkeys(_sources(table))))
        return True

    def becomes_text(self) -> bool:
        """Replace a value by its text where a string is expected; return whether it did so.

        A password may consist of digits only.
        """
        leaf, details = self.node, self.details
        if not isinstance(leaf, _Leaf) or leaf.text is None or details["type"] != "string_type":
            return False
        if leaf.value != details["input"]:  # a list item: the text is the whole list's
            return False
        leaf.value = leaf.text
        return True

    def becomes_default(self) -> bool:
        """Fill in a table's missing kind from the key's default; return whether it did so.

        Does nothing if the table has a key of another kind: ``strategy.alpha=0.3`` alone configures
        the default strategy.
        """
        if self.details["type"] != "union_tag_not_found":
            return False
        *_, key, tag = self.key
        table = _find(self.tree, self.key[:-1])
        for one in self.holder:
            if _is_model(one) and key in one.model_fields and isinstance(table, dict):
                default = one.model_fields[str(key)].get_default(call_default_factory=True)
                if not _is_model(type(default)):
                    continue
                foreign = table.keys() - type(default).model_fields.keys()
                kinds = [kind for kind in _resolved(self.types) if _is_model(kind)]
                if not any(foreign & kind.model_fields.keys() for kind in kinds):
                    table[str(tag)] = _Leaf(getattr(default, str(tag)), "default")
                    return True
        return False

    def given(self) -> str:
        """The key with its sources, and with the value unless that is a table or may be secret."""
        text = _dotted([*self.at, *self.key]) or "configuration"
        absent = self.details["type"] in ("missing", "union_tag_not_found")
        if isinstance(self.node, _Leaf) and not absent and not self._may_be_secret():
            value = self.details.get("ctx", {}).get("tag", self.details["input"])
            text += f" = {to_json(value, fallback=repr).decode()[:_SHOWN]}"
        sources = dict.fromkeys(filter(None, _sources(self.node))) if self.node else {}
        return f"{text} (from {', '.join(sources)})" if sources else text

    def _may_be_secret(self) -> bool:
        """Whether the value may be a secret: by its type, or as an unknown key beside a secret."""
        unknown = self.details["type"] == "extra_forbidden"
        fields = [one.model_fields for one in self.holder if _is_model(one)] if unknown else []
        beside = [_types_of(field) for table in fields for field in table.values()]
        return SecretStr in self.types or any(SecretStr in types for types in beside)

    def expected(self) -> str:
        kinds = {label for one in self.types for label in _labels(one)[1:]}
        match self.details["type"]:
            case "extra_forbidden":
                return self._unknown()
            case "missing":
                return "required, but not given"
            case "union_tag_not_found":
                return self._untagged(kinds)
            case "union_tag_invalid":
                return f"must be one of {', '.join(sorted(kinds))}"
            case "model_type" | "model_attributes_type" | "dict_type":
                return "must be a table" + self._as_table()
            case "bool_type":
                return "must be true or false"
            case "tuple_type" | "list_type":
                return "must be a list" + self._as_list()
            case "too_short" if SecretStr in self.types:  # would name its items
                return f"must have at least {self.details['ctx']['min_length']} characters"
            case _:
                text = re.sub(r"^(Value error|Assertion failed), ", "", self.details["msg"])
                text = text.replace(" after validation", "")  # pydantic's, of a list's length
                # A small bound, which pydantic prints without an exponent.
                text = re.sub(r"\b0\.0{4,}\d+", lambda number: repr(float(number[0])), text)
                return re.sub(r"^[A-Z]\w* should ", "must ", text)

    def _untagged(self, kinds: Iterable[str]) -> str:
        """A table without its kind has keys that the default kind lacks, or there is no default."""
        table = _find(self.tree, self.key[:-1])
        given = table if isinstance(table, dict) else {}
        models = [one for one in _resolved(self.types) if _is_model(one)]
        for key in given:
            having = [one for one in models if key in one.model_fields]
            if 0 < len(having) < len(models):
                with_key = {label for one in having for label in _labels(one)[1:]}
                needs = _dotted([*self.at, *self.key[:-1], key])
                if len(with_key) == 1:
                    return f"required with {needs}, which only {with_key.pop()} has"
                return f"required with {needs}; one of {', '.join(sorted(with_key))}"
        return f"required, but not given; one of {', '.join(sorted(kinds))}"

    def _as_table(self) -> str:
        """The hint for a kind's name in place of its table."""
        name = self.details["input"]
        if not _has_alternatives(self.types) or not isinstance(name, str):
            return ""
        models = [one for one in _resolved(self.types) if _is_model(one)]
        tag = next(tag for tag in _TAGS if all(tag in one.model_fields for one in models))
        return f", as in {_dotted([*self.at, *self.key, tag])} = {to_json(name).decode()}"

    def _as_list(self) -> str:
        """The hint for a single item in place of a list."""
        item = self.details["input"]
        if self._may_be_secret() or not isinstance(item, (str, int, float)):
            return ""
        return f", as in [{to_json(item).decode()}]"

    def _unknown(self) -> str:
        *table, key = self.key
        allowed = [name for one in self.holder if _is_model(one) for name in one.model_fields]
        hint = did_you_mean(str(key), allowed, lambda near: _dotted([*self.at, *table, near]))
        elsewhere = sorted({_dotted([*self.at, *at]) for at in _places([self.schema], str(key))})
        # A key of another kind of this table has this very place.
        is_elsewhere = _dotted([*self.at, *self.key]) not in elsewhere
        if not hint and is_elsewhere and 0 < len(elsewhere) <= _MOST_PLACES:
            hint = f"; did you mean {' or '.join(elsewhere)}?"
        having = [one for one in self.around if _is_model(one) and key in one.model_fields]
        if owners := sorted({label for one in having for label in _labels(one)[1:]}):
            hint = f"; it belongs to {', '.join(owners)}; allowed here: {', '.join(allowed)}"
        return f"unknown key{hint or '; allowed here: ' + ', '.join(allowed)}"


def _dotted(key: Sequence[str | int]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return "".join(parts).removeprefix(".")


def _find(tree: _Tree, key: Iterable[str | int]) -> _Tree | _Leaf | None:
    """The node of a key; for a key inside a list, the list."""
    node: _Tree | _Leaf | None = tree
    for part in key:
        if not isinstance(node, dict):
            break
        node = node.get(str(part))
    return node


def _sources(node: _Tree | _Leaf) -> Iterator[str]:
    if isinstance(node, _Leaf):
        yield node.source
    else:
        for inner in node.values():
            yield from _sources(inner)


# The schema: the possible types of a key. More than one type means alternatives.


def _alternatives(annotation: object) -> list[object]:
    """The members of a union (any other type: itself), without None."""
    if get_origin(annotation) is Annotated:
        plain, *metadata = get_args(annotation)
        return [one for one in metadata if isinstance(one, OneOf)] or _alternatives(plain)
    if get_origin(annotation) in (Union, UnionType):
        return [one for member in get_args(annotation) for one in _alternatives(member)]
    return [] if annotation is NoneType else [annotation]


def _types_of(field: FieldInfo) -> list[object]:
    """The types that a field's value may have."""
    open_tables = [one for one in field.metadata if isinstance(one, OneOf)]
    return list(open_tables) or _alternatives(field.annotation)


def _has_alternatives(types: Sequence[object]) -> bool:
    """Whether a table of these types has alternatives: classes, or keys that its kind decides."""
    return len(types) > 1 or any(isinstance(one, OneOf) or _is_open(one) for one in types)


def _is_open(one: object) -> bool:
    """Whether a type is a table whose ``kind`` decides which other keys it may have."""
    return (
        _is_model(one) and one.model_config.get("extra") == "allow" and "kind" in one.model_fields
    )


def _resolved(
    types: Iterable[object], *tables: _Tree | _Leaf | None, recorded: bool = False
) -> list[object]:
    """The types, with each registry replaced by the classes that the tables name."""
    found: list[object] = []
    for one in types:
        if isinstance(one, OneOf):
            tags = [table.get(one.tag) for table in tables if isinstance(table, dict)]
            names = [tag.value for tag in tags if isinstance(tag, _Leaf)]
            found += one.models(*names, recorded=recorded)
        else:
            found.append(one)
    return found


def _inside(types: Iterable[object], key: str | int) -> list[object]:
    """The types that ``key`` may have in a value of ``types``."""
    found: list[object] = []
    for one in types:
        if _is_model(one):
            if key in one.model_fields:
                found += _types_of(one.model_fields[str(key)])
        elif arguments := [argument for argument in get_args(one) if argument is not Ellipsis]:
            # dict[str, V]: V; list[V] and tuple[V, ...]: V; tuple[V, W]: by place
            place = min(key, len(arguments) - 1) if isinstance(key, int) else -1
            found += _alternatives(arguments[place])
    return found


def _places(types: Iterable[object], name: str) -> Iterator[tuple[str, ...]]:
    """The keys of this name in tables of these types and in the tables inside them."""
    for one in filter(_is_model, _resolved(types)):
        for key, field in one.model_fields.items():
            if key == name:
                yield (key,)
            yield from ((key, *inner) for inner in _places(_types_of(field), name))


def _labels(one: object) -> list[str]:
    """Labels that pydantic may use in an error's ``loc`` for a member of a union."""
    if isinstance(one, OneOf):
        return [str(one), *one.registry.names()]
    labels = [getattr(one, "__name__", str(one))]
    if _is_model(one):
        tags = [one.model_fields[tag].annotation for tag in _TAGS if tag in one.model_fields]
        labels += [value for tag in tags if get_origin(tag) is Literal for value in get_args(tag)]
    return labels


def _is_model(one: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(one, type) and issubclass(one, BaseModel)


class NamedSettings(Section):
    """Settings with a name: the key ``kind``, or another one (``naming_key``).

    A built-in class narrows the key to its name, as a literal. A user's class, also one derived
    from a built-in class, is named by the place of its definition.
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
        """Name an object that a program made after the place where its class is defined."""
        tag = cls.naming_key
        if isinstance(table, dict) and tag not in table and cls.model_fields[tag].default == "":
            return {tag: name_of(cls), **table}
        return table


def name_of(value: Any) -> str:
    """The name by which other processes find a program's object: package.module:Name, or
    path/to/file.py:Name for a module in no package."""
    module, name = value.__module__, value.__qualname__
    file = getattr(sys.modules.get(module), "__file__", None)
    source = file if file is not None and "." not in module else module
    return f"{source}:{name}"


_Parameter = inspect.Parameter


class _Arguments(Section):
    """Base of all arguments; a function's parameters may have any names and types."""

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())


def arguments(
    function: Callable[..., object], table: Mapping[str, object], at: str, *, of: str
) -> dict[str, Any]:
    """The keyword arguments of ``function`` that ``table`` sets, checked against its signature.

    ``at`` is the table's place in the configuration, ``of`` is the function in words, for errors.

    Raises ConfigError, naming the key, for an unknown, invalid or missing argument.
    """
    settable = (_Parameter.POSITIONAL_OR_KEYWORD, _Parameter.KEYWORD_ONLY)
    try:  # without a table, no type is needed
        known = [one for one in _parameters(function, typed=bool(table)) if one.kind in settable]
        keys = [one for one in known if not one.name.startswith("_")]  # pydantic's are private
        schema = _table(function, _Arguments, keys) if table else None
    except ConfigError as error:
        raise ConfigError(f"{of}: {error}") from error
    if schema is None:
        for one in known:
            if one.default is _Parameter.empty:
                raise ConfigError(f"{at}.{one.name}: required by {of}, but not given")
        return {}
    if not known:
        raise ConfigError(f"{at}.{next(iter(table))}: {of} takes no arguments; leave it out")
    settings = check(schema, table, at)
    return {name: getattr(settings, name) for name in table}


def own_class(
    value: object, base: type[Any], of_function: type[Any], given: Iterable[str]
) -> type[Any] | None:
    """A user's class derived from ``base``, or made from a function; None for any other value.

    ``of_function``: the base of a class made from a function; that class keeps the function as its
    attribute ``function``. ``given``: as in :func:`table_of`.
    """
    if isinstance(value, type):
        return value if issubclass(value, base) else None
    if not callable(value):
        return None
    made: type[Any] = table_of(value, of_function, given)
    made.function = staticmethod(value)
    return made


def call_function(settings: Any, *given: object) -> Any:
    """Call the function that a class was made from (:func:`own_class`), with its settings."""
    fields = type(settings).model_fields
    keys = {key: getattr(settings, key) for key in fields if key != settings.naming_key}
    return settings.function(*given, **keys)


def table_of(function: Callable[..., Any], base: type[M], given: Iterable[str]) -> type[M]:
    """A settings class made from a function, whose parameters become its keys.

    ``given``: the parameters that the caller passes; they become no keys. Raises ConfigError for an
    unsuitable function.
    """
    name = _name(function)
    parameters, passed = _parameters(function), tuple(given)
    if len(parameters) < len(passed):
        raise ConfigError(f"{name}() must take {', '.join(passed)}, then its own parameters")
    keys = parameters[len(passed) :]
    for one in keys:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
            raise ConfigError(f"{name}(): parameter {one} can't be a key: name each parameter")
        if one.annotation is one.empty:
            raise ConfigError(
                f"{name}(): parameter {one.name} needs a type, as in `{one.name}: float`"
            )
        if one.name in base.model_fields:
            raise ConfigError(f"{name}(): parameter {one.name} has a key's name: rename it")
    return _table(function, base, keys)


def _parameters(function: Callable[..., object], *, typed: bool = True) -> list[_Parameter]:
    """A function's parameters, with their types evaluated if ``typed``."""
    try:
        return list(inspect.signature(function, eval_str=typed).parameters.values())
    except Exception as error:  # evaluating a user's annotations may raise anything
        raise ConfigError(f"its parameters can't be read: {error}") from error


def _table(function: Callable[..., object], base: type[M], keys: Iterable[_Parameter]) -> type[M]:
    fields: dict[str, Any] = {
        one.name: (
            Any if one.annotation is one.empty else one.annotation,
            ... if one.default is one.empty else one.default,
        )
        for one in keys
    }
    try:
        with warnings.catch_warnings():  # a parameter may have the name of a method of BaseModel
            warnings.simplefilter("ignore", UserWarning)
            return create_model(
                _name(function),
                __base__=base,
                __doc__=inspect.getdoc(function),
                __module__=function.__module__,
                **fields,
            )
    except (PydanticUserError, NameError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"its parameters can't be configured: {reason}") from error


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", "function")
