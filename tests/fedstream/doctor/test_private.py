"""`fedstream doctor` on a private run: what would keep sums closed is found before it begins."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from fedstream.core.layout import Layout, Tensor
from fedstream.doctor.private import findings
from fedstream.runtime.http import HttpSettings
from fedstream.settings.config import Settings, read
from tests.helper.served import Http, serving
from tests.private.enrolled import DEVICES, OWNER, hex_of, pem_of, policy_of

LAYOUT = Layout((Tensor("weight", (50,), "float32", "parameter"),))
TOKEN = "0123456789abcdef"  # noqa: S105  (of the test's helper)


@pytest.fixture
async def helper(tmp_path: Path) -> AsyncIterator[Http]:
    """Its files, and the devices' keys, are in ``tmp_path``."""
    (tmp_path / "keys").mkdir()
    for device, key in enumerate(DEVICES):
        (tmp_path / "keys" / f"{device}.pem").write_bytes(pem_of(key))
    async with serving(tmp_path, HttpSettings(token=SecretStr(TOKEN))) as client:
        yield client


@pytest.fixture
def settings(helper: Http, tmp_path: Path) -> Settings:
    """A run of which there is nothing to find fault with."""
    private = {
        "policy": tmp_path / "policy.json",
        "owner": hex_of(OWNER),
        "helper": helper.make_url("/"),
        "token": TOKEN,
        "keys": tmp_path / "keys",
    }
    sets = [f"private.{key}={value}" for key, value in private.items()]
    return read(None, [*sets, "strategy.name=fedbuff", "strategy.buffer_size=5"])


def private(settings: Settings, **changes: object) -> Settings:
    return settings.model_copy(update={"private": settings.private.model_copy(update=changes)})


async def levels(settings: Settings, role: str | None = None, **at: float) -> dict[str, str]:
    found = await findings(settings, LAYOUT, role, at.get("now", time.time()))
    return {one.about: f"{one.level}: {one}" for one in found}


async def test_all_is_well(settings: Settings) -> None:
    found = await levels(settings)
    assert {about: said[:3] for about, said in found.items()} == {
        "privacy policy": "ok:",
        "devices' keys": "ok:",
        "privacy helper": "ok:",
    }
    assert policy_of().digest[:12] in found["privacy policy"]
    assert "its key is good for 48 h more" in found["privacy helper"]
    assert (await levels(settings, "updater")).keys() == {"privacy policy", "privacy helper"}
    assert (await levels(settings, "trainer")).keys() == {"privacy policy", "devices' keys"}


async def test_helper_that_would_not_answer_is_found(settings: Settings, tmp_path: Path) -> None:
    said = (await levels(private(settings, token=SecretStr("another"))))["privacy helper"]
    assert said.startswith("problem")
    assert "refuses private.token" in said
    said = (await levels(private(settings, helper="http://127.0.0.1:1")))["privacy helper"]
    assert "private.helper = 'http://127.0.0.1:1' can't be asked" in said
    said = (await levels(private(settings, helper=None)))["privacy helper"]
    assert "private.helper is not set" in said
    said = (await levels(settings, now=time.time() + 3 * 86_400))["privacy helper"]
    assert "the epoch's key has expired" in said


async def test_keys_that_the_helper_would_refuse_are_found(
    settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "keys" / "7.pem").write_bytes(pem_of(OWNER))
    said = (await levels(settings))["devices' keys"]
    assert said.startswith("warning")
    assert "they are not the policy's roster" in said
    (tmp_path / "keys" / "7.pem").unlink()
    trainer = settings.trainer.model_copy(update={"owns": (6, 7)})
    found = await findings(
        settings.model_copy(update={"trainer": trainer}), LAYOUT, "trainer", time.time()
    )
    assert any("has no 7.pem, and trainer.owns names device 7" in str(one) for one in found)
    said = (await levels(private(settings, keys=str(tmp_path / "none"))))["devices' keys"]
    assert "No such file" in said


async def test_policy_that_does_not_fit_is_the_one_finding(settings: Settings) -> None:
    other = settings.strategy.model_copy(update={"buffer_size": 2})
    [found] = await findings(
        settings.model_copy(update={"strategy": other}), LAYOUT, None, time.time()
    )
    assert "opens sums of 3 to 10 updates" in str(found)
    layout = Layout((Tensor("weight", (51,), "float32", "parameter"),))
    [found] = await findings(settings, layout, None, time.time())
    assert "is for 50 parameters, the model has 51" in str(found)
