"""Finding a Flower app: its ``ClientApp``, its run configuration, and the model it trains."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from fedstream.core.errors import ConfigError

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

PROJECT = "pyproject.toml"
_INSTALL = "install it with `pip install 'fedstream[flower]'`, in an environment of its own"


def is_client_app(found: object) -> TypeGuard[ClientApp]:
    """Whether an object is Flower's ``ClientApp``. Does not import flwr."""
    module = sys.modules.get("flwr.clientapp")
    return module is not None and isinstance(found, module.ClientApp)


def find(given: str) -> tuple[str, str]:
    """Find the app that ``--flower`` names; return ``package.module:attribute`` and folder.

    ``given``: the name of an app in the working directory, or a folder whose ``pyproject.toml``
    names the app. Raises ConfigError if flwr is not installed or the folder names no app.
    """
    if find_spec("flwr") is None:
        raise ConfigError(f"--flower {given}: Flower is not installed here: {_INSTALL}")
    if ":" in given:
        return given, str(Path.cwd())
    app = _table(Path(given), required=True).get("components", {}).get("clientapp")
    if not isinstance(app, str):
        raise ConfigError(
            f"--flower {given}: {Path(given) / PROJECT} has no clientapp in "
            "[tool.flwr.app.components]: name it, as in --flower my_app.client:app"
        )
    return app, str(Path(given).absolute())


def look_in(args: Mapping[str, Any]) -> None:
    """Let modules be imported from an app's folder, ``app_dir`` in its ``task.args``."""
    folder = args.get("app_dir")
    if isinstance(folder, str) and folder not in sys.path:
        sys.path.append(folder)


def run_config(folder: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The app's run configuration, with overrides. Raises ConfigError for an unknown key.

    Tables become dotted keys, as in Flower.
    """
    known = _flat(_table(folder, required=False).get("config", {}))
    if known and (unknown := overrides.keys() - known.keys()):
        raise ConfigError(
            f"task.args.run_config.{min(unknown)}: [tool.flwr.app.config] in {folder / PROJECT} "
            f"has no such key; it has {', '.join(known)}"
        )
    return known | dict(overrides)


def _table(folder: Path, *, required: bool) -> dict[str, Any]:
    """``[tool.flwr.app]`` of a folder's ``pyproject.toml``; empty if there is none."""
    file = folder / PROJECT
    if not file.is_file():
        if required:
            raise ConfigError(
                f"--flower {folder}: expected package.module:attribute, or a folder with a "
                f"{PROJECT}; there is no file {file}"
            )
        return {}
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from error
    table: object = project
    for key in ("tool", "flwr", "app"):
        table = table.get(key, {}) if isinstance(table, dict) else {}
    return table if isinstance(table, dict) else {}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
