"""Invites as `fedstream devices invite` prints them, and keys made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedstream.broker.errors import ConfigError
from fedstream.load.invites import key_of, read_invites
from fedstream.protocol.signatures import pem_of

INVITES = {device: f"{device}-{'Az09_-xY' * 4}" for device in (3, 40)}  # as in every process


def test_both_forms_are_read(tmp_path: Path) -> None:
    file = tmp_path / "invites"
    file.write_text(json.dumps({"until": 1.5, "invites": INVITES}))
    assert read_invites(file) == INVITES
    file.write_text("".join(f"device {device}: {text}\n" for device, text in INVITES.items()))
    assert read_invites(file) == INVITES


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"invites": [1]}', '{"invites": {"3": "short"}}', "device 3: short",
             f"device 3: {INVITES[3]}\nand so on\n"]
)  # fmt: skip
def test_another_file_is_refused_as_a_whole(tmp_path: Path, text: str) -> None:
    file = tmp_path / "invites"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"expected what `fedstream devices invite"):
        read_invites(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--invites .*nowhere: cannot be read"):
        read_invites(tmp_path / "nowhere")


def test_an_invite_makes_one_key() -> None:
    pems = [pem_of(key_of(one).public_key()) for one in (INVITES[3], INVITES[3], INVITES[40])]
    assert pems[0] == pems[1] != pems[2]
