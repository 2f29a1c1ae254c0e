"""Plug-ins: classes, functions and objects of other people's programs, found by name.

    fedbuff                  a built-in one
    path/to/file.py:Name     one that a file defines
    package.module:Name      one that an importable module defines
    my-rule                  one that an installed package announces, by entry point

Built-in plug-ins are looked up in the same registry as all others and can't be replaced. Every kind
of plug-in has a :class:`PluginRegistry`, whose group is that of the entry points. A table of the
configuration chooses a class by its tag, and that class validates the table:

    strategy: Annotated[Strategy, OneOf(RULES, tag="name")]

Importing a file or a module runs its program. A recording may come from anybody, so a program that
only a recording names is not imported unless :func:`allowing` says so. An entry point's package was
installed on purpose, so its name alone runs nothing that its user didn't choose.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from inspect import isabstract
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, get_args, get_origin

from pydantic import (
    BaseModel,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
)
from pydantic.errors import PydanticUserError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema, to_json

from fedstream.core.digest import digest_of
from fedstream.core.errors import ConfigError, FedstreamError, innermost
from fedstream.runtime.text import check_spelling, did_you_mean

if TYPE_CHECKING:
    from types import ModuleType

T = TypeVar("T")
E = TypeVar("E", bound=FedstreamError)

Origin: TypeAlias = Literal["built in", "file", "module", "entry point"]

OWN = "path/to/file.py:Name or package.module:Name"


class NotTrusted(ConfigError):
    """A program that only a recording names, and that the user has not allowed to run."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What recordings may do in this context; nothing by default."""

    recorded: bool = False  # run programs that only a recording names
    changed: bool = False  # continue although a rule's source has changed


_imported: list[str] = []  # programs that are not ours
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_STANDARD = f"{sysconfig.get_paths()['stdlib']}{os.sep}"
_IMPORTLIB = f"{_STANDARD}importlib{os.sep}"
_BACKPORT = f"{os.sep}importlib_metadata{os.sep}"  # takes importlib's part once it is imported

_ALLOWED: ContextVar[Allowed] = ContextVar("allowed", default=Allowed())  # noqa: B039  (frozen)


def allowed() -> Allowed:
    """What recordings may do in this context."""
    return _ALLOWED.get()


@contextmanager
def allowing(*, recorded: bool = False, changed: bool = False) -> Iterator[None]:
    """Extend the permissions inside the block."""
    now = _ALLOWED.get()
    token = _ALLOWED.set(Allowed(now.recorded or recorded, now.changed or changed))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


@dataclass(frozen=True, slots=True)
class Plugin(Generic[T]):
    """The object that a name stands for, and its origin."""

    name: str  # with a file's absolute path, so that it means the same in any folder
    value: T
    origin: Origin
    source: Path | None = None  # the defining file; None: built in or unknown
    digest: str | None = None  # SHA-256 of that file, in hexadecimal


class PluginRegistry(Generic[T]):
    """Finds the plug-ins of one kind.

    ``group``: of entry points. ``what``: the kind in words, for errors. ``built_in``: fedstream's
    own plug-ins by name. ``accept``: returns the plug-in for a program's object (usually itself),
    or None if the object is unsuitable. ``expected``: describes suitable objects, for errors.
    """

    def __init__(
        self,
        group: str,
        what: str,
        built_in: Mapping[str, T],
        *,
        accept: Callable[[object], T | None],
        expected: str,
    ) -> None:
        self.group = group
        self.what = what
        self.built_in = dict(built_in)
        self._accept = accept
        self._expected = expected
        self._found: dict[str, Plugin[T]] = {}

    def find(self, name: str, *, recorded: bool = False) -> Plugin[T]:
        """The plug-in of this name. ``recorded``: named by a recording only, not by the user.

        A name is resolved once, so later changes of a file go unnoticed by this process. Raises
        ConfigError, in one line; NotTrusted if a recorded program may not be run.
        """
        if name in self.built_in:
            return Plugin(name, self.built_in[name], "built in")
        full = absolute(name)
        if full not in self._found:
            self._found[full] = self._program(full, recorded) if ":" in full else self._entry(name)
        return self._found[full]

    def known(self, name: object, *, recorded: bool = False) -> T | None:
        """The object that a name stands for, or None if the look-up fails."""
        try:
            return self.find(name, recorded=recorded).value if isinstance(name, str) else None
        except FedstreamError:
            return None

    def renew(self, name: str, value: object) -> None:
        """After a reload, forget the name's cached object unless this object is ``value``."""
        known = getattr(self._found.get(name), "value", None)
        if value not in (known, getattr(known, "function", None)):
            self._found.pop(name, None)

    @contextmanager
    def lending(self, name: str, value: T) -> Iterator[None]:
        """Inside the block, let ``name`` stand for ``value``, which a program defined."""
        full = absolute(name)
        before = self._found.get(full)
        self._found[full] = Plugin(full, value, "module")
        try:
            yield
        finally:
            del self._found[full]
            if before is not None:
                self._found[full] = before

    def accepted(self, value: object) -> T:
        """The plug-in for an object that a program defines. Raises ConfigError."""
        found = self._accept(value)
        if found is None:
            raise ConfigError(f"{_described(value)}: expected {self._expected}")
        if isinstance(found, type):
            check_spelling(found)
        return found

    def names(self) -> list[str]:
        """All names that need no path: built-in ones first, then those of installed packages."""
        return [*self.built_in, *sorted(self.announced().keys() - self.built_in.keys())]

    def announced(self) -> dict[str, EntryPoint]:
        """The entry points of installed packages, by name."""
        return {entry.name: entry for entry in entry_points(group=self.group)}

    def _program(self, name: str, recorded: bool) -> Plugin[T]:
        if recorded and not allowed().recorded:
            raise NotTrusted(f"loading the {self.what} {name!r} runs its code")
        value, module = import_attribute(name, what=self.what)
        return self._made(name, value, "file" if ".py:" in name else "module", module)

    def _entry(self, name: str) -> Plugin[T]:
        entry = self.announced().get(name)
        if entry is None:
            raise ConfigError(self._unknown(name))
        _imported.append(name)
        try:
            value = entry.load()
        except FedstreamError:
            raise
        except (Exception, SystemExit) as error:
            whose = f"{self.what} {name!r}, entry point {entry.value}"
            raise ConfigError(f"{whose}: importing it raised {words(error)}") from error
        return self._made(name, value, "entry point", sys.modules[entry.module])

    def _made(self, name: str, value: object, origin: Origin, module: ModuleType) -> Plugin[T]:
        try:
            accepted = self.accepted(value)
        except ConfigError as error:
            raise ConfigError(f"{self.what} {name!r}: {error}") from error
        if isinstance(accepted, type):
            _check_usable(accepted, f"{self.what} {name!r}")
        source = _source_of(value, module)
        digest = None if source is None else digest_of(source.read_bytes())
        return Plugin(name, accepted, origin, source, digest)

    def _unknown(self, name: str) -> str:
        names = self.names()
        if name.endswith(".py"):
            return f"{name!r} is a file: also name the {self.what} in it, as in {name}:Name"
        if hint := did_you_mean(name, names):
            return f"there is no {self.what} {name!r}{hint}"
        return f"must be one of {', '.join(names)}, or your own, as {OWN}"


def runs_program(name: str) -> bool:
    """Whether a look-up of this name imports a program at the path or module in the name."""
    return bool(name.rpartition(":")[0])


def anything_imported() -> bool:
    """Whether this process has begun to import a program that is not ours."""
    return bool(_imported)


def absolute(name: str) -> str:
    """The same name for any working directory: a file by its absolute path."""
    source, colon, attribute = name.rpartition(":")
    if not source.endswith(".py"):
        return name
    return f"{os.path.abspath(source)}{colon}{attribute}"  # noqa: PTH100  (without `..`)


def import_attribute(name: str, *, what: str) -> tuple[Any, ModuleType]:
    """An object that a file or module defines, and the module. ``what``: its kind, for errors.

    Raises ConfigError if there is no such object or its program fails.
    """
    source, _, attribute = name.rpartition(":")
    module = _import(source, what)
    try:
        return getattr(module, attribute), module
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        hint = did_you_mean(attribute, public)
        raise ConfigError(f"{what} {name!r}: {source} defines no {attribute!r}{hint}") from None


def _import(source: str, what: str) -> ModuleType:
    """Import a module by its dotted name or its file.

    A file is imported under its stem, with its folder appended to ``sys.path``. So the user's
    program can import its neighbours, and a spawned process, which inherits the path but not the
    modules, finds it under the same name.
    """
    file = Path(source).resolve() if source.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ConfigError(f"{what} {source!r}: there is no file {file}")
    _imported.append(source)
    name = source if file is None else file.stem
    folder = str(Path.cwd() if file is None else file.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        if file is not None and not _is_found(name, file):
            raise ConfigError(
                f"{what} {source!r}: the name {name!r} belongs to another module: rename the file"
            )
        return importlib.import_module(name)
    except NotTrusted:
        raise
    except FedstreamError as error:  # of a function of ours that the program called
        place = _place(error)
        raise ConfigError(f"{what} {source!r}: {error}{place}" if place else str(error)) from error
    except (Exception, SystemExit) as error:  # a program may end where it lacks something
        raise ConfigError(f"{what} {source!r}: importing it raised {words(error)}") from error


def words(error: BaseException) -> str:
    """An exception (of a group, the first) in one line, with its place."""
    error = innermost(error)
    if isinstance(error, SyntaxError) and error.filename is not None:  # raised by the compiler
        return f"{type(error).__name__}: {error.msg} at {error.filename}:{error.lineno}"
    return f"{_in_one_line(error)}{_place(error)}"


def _place(error: BaseException) -> str:
    """The last place in an exception's traceback, if possible one that is not ours.

    '' if only the import system and this module have frames in it.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen ", _IMPORTLIB, __file__))
        and _BACKPORT not in frame.filename
    ]
    theirs = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    last = next(reversed(theirs or frames), None)
    return f" at {last.filename}:{last.lineno}" if last else ""


def place_of(error: BaseException) -> str:
    """The type of an exception and its raising place, which identify repetitions."""
    error = innermost(error)
    frames = traceback.extract_tb(error.__traceback__)
    at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{at}"


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def users_traceback(error: BaseException) -> str:
    """The traceback from the user's first frame on, with the exception in its last line.

    Frames before that are ours, torch's or the standard library's. '' if the user has no frame.
    """
    error = innermost(error)
    whole = traceback.TracebackException.from_exception(error)
    found = [_cut_to_users(one) for one in _chain(whole)]
    if not found[0]:
        return ""
    lines = list(whole.format())
    own = len(list(whole.format_exception_only()))
    return "".join(lines[:-own]) + _in_one_line(error)


def about(error: BaseException, said: E) -> E:
    """Attach the user's traceback of ``error`` to ``said`` as its ``trace``."""
    if trace := error.trace if isinstance(error, FedstreamError) else users_traceback(error):
        said.add_note(trace)
    return said


def _chain(found: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """The exception, and its causes and contexts."""
    one: traceback.TracebackException | None = found
    while one is not None:
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _cut_to_users(found: traceback.TracebackException) -> bool:
    """Leave out the frames before the user's first one; returns whether there is one."""
    first = next((n for n, one in enumerate(found.stack) if _is_users(one.filename)), None)
    del found.stack[:first]
    return first is not None


def _is_users(file: str) -> bool:
    """Whether a file is neither ours nor torch's nor the standard library's."""
    if file.startswith(_OURS):
        return False
    if installed := file.partition(f"-packages{os.sep}")[2]:
        return not installed.startswith(f"torch{os.sep}")
    return not file.startswith((_STANDARD, "<frozen "))


def _is_found(name: str, file: Path) -> bool:
    """Whether importing ``name`` gives this file rather than another module of that name."""
    spec = None if "." in name else importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file


def _source_of(value: object, module: ModuleType) -> Path | None:
    """The file that defines an object, or else the file of its module."""
    owner = sys.modules.get(getattr(value, "__module__", None) or "", module)
    file = getattr(owner, "__file__", None) or getattr(module, "__file__", None)
    return Path(file) if file is not None and Path(file).is_file() else None


def _check_usable(cls: type[Any], whose: str) -> None:
    """Raise ConfigError for a class that can't be instantiated."""
    if isabstract(cls):
        missing = ", ".join(f"{name}()" for name in sorted(cls.__abstractmethods__))
        raise ConfigError(f"{whose}: the class does not define {missing}")
    if issubclass(cls, BaseModel):
        try:
            cls.model_rebuild()
        except (NameError, PydanticUserError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{whose}: its keys cannot be read: {reason}") from error


def _described(value: object) -> str:
    kind = "the class" if isinstance(value, type) else "of type"
    return f"is {kind} {(value if isinstance(value, type) else type(value)).__name__}"


# In a validation's context: values come from a recording, so programs need the user's consent.
RECORDED = {"recorded": True}


@dataclass(frozen=True)
class OneOf:
    """Annotation of a table: its key ``tag`` names the class of the registry that validates it.

    The annotated base class must declare ``tag`` as a string; built-in classes narrow it to a
    literal.
    """

    registry: PluginRegistry[Any]
    tag: str = "kind"

    def __get_pydantic_core_schema__(
        self, base: type[BaseModel], _handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def validated(value: object, info: ValidationInfo) -> BaseModel:
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

        return core_schema.with_info_plain_validator_function(validated)

    def __get_pydantic_json_schema__(
        self, _schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The schema of the built-in classes; others are unknown here."""
        models = self.registry.built_in.values()
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
            found = self.registry.find(tag, recorded=recorded)
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
        """The classes of these tags, or the built-in classes if none is known."""
        known = [self.registry.known(tag, recorded=recorded) for tag in tags]
        named = [model for model in known if model is not None]
        return named or list(self.registry.built_in.values())
