"""Make ``import torchvision`` work where its compiled operators cannot be loaded.

A torchvision wheel built for CUDA next to a torch that was not is a common pair (``torch==2.13.0``
from an index of CPU builds): its library then fails to load, and the import fails because shapes
are registered for two operators that nobody declared. Data sets and transforms need neither.
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

_OPERATORS = ("torchvision::nms", "torchvision::qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_DECLARING = Lock()  # services of one process load their tasks in threads, and twice is an error


def declare_missing() -> None:
    """Declare the two operators if torchvision's own library will not; repeating it is harmless.

    Loading that library is what torchvision does first itself, so where it works nothing changes.
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
