"""Make ``import torchvision`` work where its compiled operators cannot be loaded.

A torchvision wheel built for CUDA is often installed beside a CPU build of torch (``torch==2.13.0``
from an index of CPU builds). torchvision's library then fails to load, and the import fails because
it registers shapes for two operators that are not declared. Data sets and transforms need neither.
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

_OPERATORS = ("torchvision::nms", "torchvision::qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_DECLARING = Lock()  # declaring twice is an error, and services may load tasks in threads


def declare_missing() -> None:
    """Declare the two operators if torchvision's own library can't; idempotent.

    It tries to load that library first, as torchvision itself does, so nothing changes where that
    works.
    """
    import torch

    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return  # not installed: the import will say so
    folder = Path(spec.origin).parent
    for library in (folder / f"_C{suffix}" for suffix in EXTENSION_SUFFIXES):
        if library.exists():
            try:
                torch.ops.load_library(library)  # type: ignore[no-untyped-call]
            except OSError:
                break
    with _DECLARING:
        for operator in _OPERATORS:
            if not hasattr(torch.ops.torchvision, operator.partition("::")[2]):
                torch.library.define(operator, _SCHEMA)
