"""A device under a privacy policy: what it sends, and which tasks it refuses."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from fedstream.broker.client import RedisSettings
from fedstream.cli.app import main
from fedstream.core.errors import ConfigError, FedstreamError
from fedstream.core.layout import Model
from fedstream.device.connection import GatewayAddress
from fedstream.device.folder import DeviceFolder
from fedstream.device.key import own_key
from fedstream.device.privacy import NotPrivate
from fedstream.device.process import DeviceOptions, run_device
from fedstream.device.uploads import UpdateUpload
from fedstream.operate.enrolment import invite
from fedstream.private import masks
from fedstream.private.policy import PrivacyPolicy, signed
from fedstream.private.sealing import EpochKey, EpochSecret, SealedUpdate
from fedstream.protocol.messages import Offer, OfferedPrivacy
from fedstream.trainer.learner import Learner
from fedstream.trainer.solvers import Trained, Work
from fedstream.trainer.workspace import Start
from tests.coordinator.gateway.places import SITE, coordinating, owned_by, serving
from tests.coordinator.gateway.uploading import queued
from tests.device.conftest import Options
from tests.device.fake import FakeGateway
from tests.device.test_worker import killed_in, nothing
from tests.private.enrolled import (
    DEVICES,
    HELPER,
    OWNER,
    epoch_of,
    hex_of,
    key_of,
    pem_of,
    policy_of,
)
from tests.support import Hand
from tests.trainer.stepping import SGD, Plain, Steps

POLICY = policy_of(parameters=10)
OTHER = policy_of(parameters=10, clip=2.0)
LINE = "line-of-the-run"
Private = Callable[..., DeviceOptions]


@pytest.fixture
def task() -> Plain:
    return Plain()


@pytest.fixture
def private(options: Options, tmp_path: Path) -> Private:
    """Makes the options of device 7, which has its key of the roster and the policy."""
    key = tmp_path / "device.pem"
    key.touch(mode=0o600)
    key.write_bytes(pem_of(DEVICES[7]))
    return lambda **changes: options(**{"policy": POLICY, **changes})


def privacy_of(key: EpochKey, policy: PrivacyPolicy = POLICY) -> OfferedPrivacy:
    return OfferedPrivacy.of(policy.text.decode(), LINE, key.encode())


def offers(
    gateway: FakeGateway, model: Model, private: OfferedPrivacy | None, **about: Any
) -> Offer:
    """The gateway offers a task with this privacy."""
    about = {"format": "f32", "sends": "delta"} | about
    offer = gateway.offer(model, **about).model_copy(update={"private": private})
    gateway.offers[-1] = offer
    return offer


def learned(task: Plain, model: Model, name: str = "task-1") -> np.ndarray[Any, Any]:
    """The delta that a device learns in three steps, clipped to S, in units."""
    into = Model(model.layout)
    work = Work(7, name, 0, 5, 3, None, SGD, lambda: False)
    Learner(lambda: task, 1, "cpu").train(Start(0, model.digest(), model), work, into, "delta")
    delta = into.parameters.astype(np.float64)
    clipped: np.ndarray[Any, Any] = delta * min(1.0, POLICY.clip / float(np.linalg.norm(delta)))
    return clipped * 2.0**POLICY.scale_bits


def opened(data: bytes, sealed: SealedUpdate, secret: EpochSecret) -> np.ndarray[Any, Any]:
    """What the helper and the server together find in an update."""
    mask = masks.sum_of_masks([(secret.seed_of(sealed, POLICY.kem), 1)], None, POLICY.parameters)
    return masks.unmasked(masks.unpacked(data, POLICY), mask, POLICY)


# what it sends


async def test_real_gateway_gets_a_masked_update_and_nothing_about_the_data(
    hand: Hand, redis: RedisSettings, private: Private, task: Plain, model: Model
) -> None:
    """From the invite to the updater's queue."""
    hand.layout, said = model.layout, list[str]()
    await hand.create(policy=POLICY.text.decode(), lineage=LINE, sends="delta")
    x_tau = await hand.model((await hand.published())[0])
    secret, key = epoch_of(POLICY)
    await hand.client.call("SET", hand.keys.sealing, key.encode())
    async with coordinating(hand, redis), serving(hand, redis, identity=None) as place:
        made = await invite(hand.client, hand.keys, SITE, [7], seconds=60)
        about = private(address=GatewayAddress(place.url), invite=made.invites[7])

        async def opens() -> None:
            await owned_by(hand, 7, "gw-0")
            await hand.open(device=7, steps=3, epochs=None, seed=5)

        async with asyncio.TaskGroup() as group:
            group.create_task(opens())
            group.create_task(run_device(about, said.append, nothing))
        upload, data = await queued(hand)
    assert (upload.format, upload.sends, upload.site) == ("mask32", "delta", SITE)
    assert (upload.samples, upload.steps, upload.loss, upload.seconds) == (0, 0, None, 0.0)
    assert upload.lr == SGD.lr
    assert upload.sealed is not None
    sealed = SealedUpdate.decode(upload.sealed)
    DEVICES[7].public_key().verify(sealed.signature, sealed.signed)
    assert (sealed.run, sealed.policy, sealed.layout) == (LINE, POLICY.digest, upload.layout)
    assert (sealed.task, sealed.attempt, sealed.device) == (upload.task, upload.attempt, 7)
    assert (sealed.tau, sealed.masked) == (0, hashlib.sha256(data).hexdigest())
    assert np.all(np.abs(opened(data, sealed, secret) - learned(task, x_tau, upload.task)) < 1.0)
    assert said[-1] == (
        f"task {upload.task}: admitted: trained from version 0, masked and sealed, 40 bytes"
    )


async def test_update_is_masked_whatever_the_offer_asks_for(
    gateway: FakeGateway, private: Private, task: Plain, model: Model
) -> None:
    """Such as a model in float32, in which a curious gateway would read the data."""
    secret, key = epoch_of(POLICY)
    offer = offers(gateway, model, privacy_of(key), sends="model", format="f32")
    await run_device(private(), nothing, nothing)
    sent = gateway.sent[offer.attempt]
    assert sent.report.format == "mask32"
    assert sent.report.seal is not None
    sealed = SealedUpdate.decode(sent.report.seal)
    assert np.all(np.abs(opened(bytes(sent.data), sealed, secret) - learned(task, model)) < 1.0)
    told = sent.report.model_dump()
    assert (told["samples"], told["steps"], told["loss"], told["seconds"]) == (0, 0, None, 0.0)


async def test_resent_update_has_the_same_bytes_and_a_new_attempt_another_seed(
    gateway: FakeGateway, private: Private, task: Plain, model: Model, tmp_path: Path
) -> None:
    """Two updates by one seed would give their difference away: it is that of the masked ones."""
    secret, key = epoch_of(POLICY)
    first = offers(gateway, model, privacy_of(key))
    await killed_in(UpdateUpload, "receipt", private())
    kept = DeviceFolder(tmp_path / "state").update()
    assert kept is not None
    second = offers(gateway, model, privacy_of(key), task="task-2")
    await run_device(private(), nothing, nothing)
    sent = gateway.sent[first.attempt]
    assert (bytes(sent.data), sent.report) == (kept.data.tobytes(), kept.report)
    third = offers(gateway, model, privacy_of(key), task="task-2")  # the gateway asks again
    await run_device(private(), nothing, nothing)
    seals = [gateway.sent[one.attempt].report.seal for one in (first, second, third)]
    seeds = {secret.seed_of(SealedUpdate.decode(seal or b""), POLICY.kem) for seal in seals}
    assert len(seeds) == 3
    assert task.steps == 9


async def test_finished_update_lies_masked_on_the_disk(
    gateway: FakeGateway, private: Private, model: Model, tmp_path: Path
) -> None:
    """Whoever finds the device's folder finds no update that was never sent."""
    _, key = epoch_of(POLICY)
    offers(gateway, model, privacy_of(key))
    await killed_in(UpdateUpload, "receipt", private())
    kept = DeviceFolder(tmp_path / "state").update()
    assert kept is not None
    assert kept.report.format == "mask32"
    assert kept.data.nbytes == 40
    assert (kept.unsent, kept.local) == (None, None)


async def test_update_that_is_not_finite_is_sent_as_zeros(
    gateway: FakeGateway, private: Private, model: Model
) -> None:
    """A task given up would tell the server that its model overflows on this device's data."""

    class Diverging(Plain):
        """Ends at infinity."""

        def train(self, module: nn.Module, data: Any, work: Work) -> Trained:
            trained = super().train(module, data, work)
            with torch.no_grad():
                module.get_parameter("bias")[0] = torch.inf
            return trained

    secret, key = epoch_of(POLICY)
    offers(gateway, model, privacy_of(key))
    task = Diverging()
    await run_device(private(load=lambda: task), nothing, nothing)
    [sent] = gateway.sent.values()
    assert gateway.given_up == []
    sealed = SealedUpdate.decode(sent.report.seal or b"")
    assert not opened(bytes(sent.data), sealed, secret).any()


# what it refuses


def forged(what: str) -> OfferedPrivacy | None:
    """The privacy that a malicious server offers to read the update itself."""
    own = EpochSecret.new("x25519")  # of the server
    real = privacy_of(epoch_of(POLICY)[1])
    match what:
        case "none":
            return None
        case "other policy":
            return privacy_of(own.announced(OTHER, HELPER, 1 << 40), OTHER)
        case "key of the server":
            return privacy_of(own.announced(POLICY, key_of(5), 1 << 40))
        case "key of another policy":
            return privacy_of(own.announced(OTHER, HELPER, 1 << 40))
        case "expired key":
            return privacy_of(own.announced(POLICY, HELPER, 1_000_000))
        case "server's key under the helper's signature":
            signature = EpochKey.decode(real.epoch_key).signature
            mine = own.announced(POLICY, key_of(5), 1 << 40)
            return privacy_of(mine.model_copy(update={"signature": signature}))
        case _:
            return real.model_copy(update={"key": base64.b64encode(b"junk").decode()})


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("none", "a run that is not private"),
        ("other policy", f"under policy {OTHER.digest}"),
        ("key of the server", "not the helper's"),
        ("key of another policy", f"is for policy {OTHER.digest}"),
        ("expired key", "has expired"),
        ("server's key under the helper's signature", "not the helper's"),
        ("junk", "the helper's key that the gateway offers"),
    ],
)
async def test_attempts_to_read_an_update_end_the_device_before_it_trains(
    gateway: FakeGateway, private: Private, task: Plain, model: Model, what: str, says: str
) -> None:
    offers(gateway, model, forged(what))
    with pytest.raises(NotPrivate, match=says) as raised:
        await run_device(private(), nothing, nothing)
    assert "\n" not in str(raised.value)
    assert (task.steps, gateway.sent) == (0, {})


async def test_key_that_expires_during_training_is_not_used(
    gateway: FakeGateway, private: Private, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offer's key was good; when training has ended, its secret half is deleted or leaked."""
    _, key = epoch_of(POLICY, 2_000_000_000)
    offers(gateway, model, privacy_of(key))
    train = Learner.train

    def long(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr("fedstream.device.privacy.time.time", lambda: 2_000_000_000.0)
        return train(*arguments, **named)

    monkeypatch.setattr(Learner, "train", long)
    with pytest.raises(NotPrivate, match="has expired"):
        await run_device(private(), nothing, nothing)
    assert gateway.sent == {}
    assert gateway.given_up == [("task-1", "raised NotPrivate")]


async def test_metrics_are_neither_promised_nor_measured(
    gateway: FakeGateway, private: Private, model: Model
) -> None:
    class Tested(Plain):
        """Every device has test data."""

        def device_test_data(self, device: int) -> Any:
            return self.device_data(device)

    _, key = epoch_of(POLICY)
    asked = gateway.evaluates(model)
    offers(gateway, model, privacy_of(key))
    await run_device(private(load=Tested), nothing, nothing)
    assert gateway.check_ins[0].evaluates is False
    assert "mask32" in gateway.check_ins[0].formats
    assert gateway.given_up == [(asked.task.id, "no test data")]
    assert gateway.measured == {}


async def test_device_without_a_policy_takes_no_private_task(
    gateway: FakeGateway, options: Options, task: Plain, model: Model
) -> None:
    offers(gateway, model, privacy_of(epoch_of(POLICY)[1]))
    with pytest.raises(FedstreamError, match="start this device with --policy"):
        await run_device(options(), nothing, nothing)
    assert task.steps == 0


async def test_model_with_buffers_or_of_another_size_is_refused_before_the_first_request(
    gateway: FakeGateway, private: Private, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"1\.running_mean"):
        await run_device(private(load=Steps), nothing, nothing)
    small = policy_of(parameters=9)
    with pytest.raises(ConfigError, match=r"for 9 parameters, the model has 10"):
        await run_device(private(policy=small, folder=tmp_path / "other"), nothing, nothing)
    assert gateway.asked == []


# the policy is pinned


async def test_policy_is_kept_for_ever(
    gateway: FakeGateway, private: Private, model: Model, tmp_path: Path
) -> None:
    """Also when it enrols anew, and whatever its starter says."""
    _, key = epoch_of(POLICY)
    offers(gateway, model, privacy_of(key))
    await run_device(private(), nothing, nothing)
    gateway.keys.clear()
    offers(gateway, model, privacy_of(key))
    await run_device(private(invite=gateway.invite(7)), nothing, nothing)
    asked = len(gateway.asked)
    for policy in (None, OTHER):
        with pytest.raises(ConfigError, match=f"under policy {POLICY.digest} alone"):
            await run_device(private(policy=policy), nothing, nothing)
    assert len(gateway.asked) == asked
    assert len(gateway.sent) == 2


async def test_update_from_before_the_policy_is_never_sent(
    gateway: FakeGateway, options: Options, private: Private, model: Model
) -> None:
    offers(gateway, model, None)
    await killed_in(UpdateUpload, "receipt", private(policy=None))
    gateway.offers.clear()
    _, key = epoch_of(POLICY)
    offers(gateway, model, privacy_of(key), task="task-2")
    await run_device(private(), nothing, nothing)
    assert [one.report.format for one in gateway.sent.values()] == ["mask32"]


async def test_policy_needs_a_key_of_its_roster(
    gateway: FakeGateway, options: Options, tmp_path: Path
) -> None:
    own_key(tmp_path / "old.pem")
    with pytest.raises(ConfigError, match="Ed25519"):
        await run_device(options(policy=POLICY, key=tmp_path / "old.pem"), nothing, nothing)
    assert gateway.asked == []
    assert isinstance(own_key(tmp_path / "new.pem", ed25519=True), Ed25519PrivateKey)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--policy", "policy.json"], "--policy and --policy-owner go together"),
        (["--policy", "none", "--policy-owner", hex_of(OWNER)], "--policy none: No such file"),
        (["--policy", "policy.json", "--policy-owner", "me"], "--policy-owner: expected"),
        (
            ["--policy", "policy.json", "--policy-owner", hex_of(HELPER)],
            "--policy policy.json: the policy is not signed by the helper's owner",
        ),
    ],
)
def test_mistake_is_told_in_one_sentence(
    options: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.json").write_bytes(signed(POLICY, OWNER))
    with pytest.raises(SystemExit) as ended:
        main(["device", "--url", "https://127.0.0.1:9", "--key", "device.pem", *options])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"fedstream: {said}")
    assert shown.count("\n") == 1
