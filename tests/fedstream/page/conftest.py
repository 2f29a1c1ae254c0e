"""A run for the pages: three segments, refusals, measurements, and a device that stands out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedstream.broker.layout import Payload
from fedstream.broker.messages import Upload
from fedstream.journal import Taken
from tests.journals import Scribe

VERSIONS = 60


class _Measuring(Scribe):
    """Notes how far each update alone would move the model: device 3's by far the most."""

    def _taken(self, upload: Upload, sent: Payload, **about: Any) -> Taken:
        if about["outcome"] == "applied":
            size = 50.0 if upload.device == 3 else 1.0 + self.version / 100
            about["sizes"] = (size, 0.0, 0.0)
        return super()._taken(upload, sent, **about)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 versions by fedasync from 10 devices; device 3 was refused five times, device 7 once."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    scribe = _Measuring(folder / "journal", versions=VERSIONS)
    for n in range(VERSIONS):
        if n in (20, 40):
            scribe.segment()
        scribe.update(
            n % 10, late=min(n, n % 4), sizes=(50.0 if n % 10 == 3 else 1.0 + n / 100,) * 3
        )
        if n % 12 == 11:
            scribe.refuse(3)
    scribe.refuse(7, "too stale")
    scribe.close()
    lines = ["version,seconds,updates,total_updates,accuracy,test_loss"]
    lines += [f"{v},{v * 1.5},10,{v},{v / 100},{2 - v / 50}" for v in range(0, VERSIONS + 1, 10)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder
