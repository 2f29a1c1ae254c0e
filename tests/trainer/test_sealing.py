"""A trainer in a private run: what it sends, and in which runs it takes no part."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedstream.broker import blobs
from fedstream.core.errors import ConfigError
from fedstream.core.formats import format_of
from fedstream.core.messages import Event, GiveUp, Measured, Presence, Upload, decode
from fedstream.core.records import head_of
from fedstream.private import masks
from fedstream.private.policy import PrivacyPolicy, signed
from fedstream.private.sealing import EpochSecret, SealedUpdate
from fedstream.private.settings import PrivateSettings
from fedstream.trainer.settings import TrainerSettings
from fedstream.trainer.solvers import Trained, Work
from fedstream.trainer.task import initial
from fedstream.trainer.vector import layout_of
from tests.coordinator.gateway.places import evaluates
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
from tests.support import Hand, context, running, wait_until
from tests.trainer.adding import Adds, Make, answers
from tests.trainer.stepping import H, Plain, Steps, stopped_midway
from tests.trainer.test_device_evaluations import Measures
from tests.trainer.test_local import Personal

LINE = "line-of-the-run"
POLICY = policy_of(parameters=4, clip=10.0)


def settings_of(folder: Path, policy: PrivacyPolicy = POLICY) -> PrivateSettings:
    """Writes the files of a trainer of ten devices."""
    (folder / "policy.json").write_bytes(signed(policy, OWNER))
    (folder / "keys").mkdir(exist_ok=True)
    for device, key in enumerate(DEVICES[:10]):
        (folder / "keys" / f"{device}.pem").write_bytes(pem_of(key))
    return PrivateSettings(
        policy=str(folder / "policy.json"), owner=hex_of(OWNER), keys=str(folder / "keys")
    )


@pytest.fixture
def private(tmp_path: Path) -> PrivateSettings:
    return settings_of(tmp_path)


async def created(hand: Hand, policy: PrivacyPolicy = POLICY, **changes: Any) -> EpochSecret:
    """A private run, and its helper's epoch, whose key is in Redis."""
    await hand.create(policy=policy.text.decode(), sends="delta", lineage=LINE, **changes)
    secret, key = epoch_of(policy)
    await hand.client.call("SET", hand.keys.sealing, key.encode())
    return secret


async def bytes_of(hand: Hand, upload: Upload) -> bytes:
    data: bytes = await hand.client.call("HGET", hand.keys.update(upload.blob), 0)
    return data


async def opened(hand: Hand, upload: Upload, secret: EpochSecret) -> tuple[list[int], bytes]:
    """What the helper and the server together find in an update, and its seed."""
    assert upload.sealed is not None
    sealed, data = SealedUpdate.decode(upload.sealed), await bytes_of(hand, upload)
    assert sealed.masked == hashlib.sha256(data).hexdigest()
    seed = secret.seed_of(sealed, POLICY.kem)
    mask = masks.sum_of_masks([(seed, 1)], None, 4)
    return masks.unmasked(masks.unpacked(data, POLICY), mask, POLICY).tolist(), seed


async def test_update_opens_to_the_rounded_delta_for_the_helper_alone(
    hand: Hand, make: Make, private: PrivateSettings
) -> None:
    secret = await created(hand)
    async with running(make(private=private), context()):
        await hand.open(device=3)
        [upload] = await answers(hand)
    assert isinstance(upload, Upload)
    assert upload.sealed is not None
    one = 1 << POLICY.scale_bits  # training adds one, which is a whole number of units
    found, _ = await opened(hand, upload, secret)
    assert found == [one] * 4
    assert (upload.format, upload.sends, upload.size) == ("mask32", "delta", 16)
    assert format_of(upload.format).sizes(hand.layout) == (16, 16)
    assert upload.digest == hashlib.sha256(await bytes_of(hand, upload)).hexdigest()
    sealed = SealedUpdate.decode(upload.sealed)
    assert (sealed.run, sealed.task, sealed.attempt) == (LINE, upload.task, upload.attempt)
    assert (sealed.device, sealed.tau, sealed.layout) == (3, 0, hand.layout.signature)
    DEVICES[3].public_key().verify(sealed.signature, sealed.signed)


async def test_nothing_of_a_devices_training_is_told(
    hand: Hand, make: Make, private: PrivateSettings
) -> None:
    """Training did one step on one sample, with a loss of .5."""
    await created(hand)
    async with running(make(private=private), context()):
        await hand.open(device=3)
        [upload] = await answers(hand)
    assert isinstance(upload, Upload)
    assert (upload.samples, upload.steps, upload.loss, upload.seconds) == (0, 0, None, 0.0)


async def test_second_attempt_is_no_two_time_pad(
    hand: Hand, make: Make, private: PrivateSettings
) -> None:
    """By one seed, the difference of two attempts would be the difference of their updates: 0."""
    secret = await created(hand)
    async with running(make(private=private), context()):
        [first] = await hand.open(device=3)
        await answers(hand)
        await hand.open(device=3, task=first.task)
        one, two = await answers(hand, 2)
    assert isinstance(one, Upload)
    assert isinstance(two, Upload)
    (found, seed), (again, other) = [await opened(hand, each, secret) for each in (one, two)]
    assert found == again
    assert seed != other
    assert await bytes_of(hand, one) != await bytes_of(hand, two)


async def test_finished_update_waits_for_the_helpers_key(
    hand: Hand, make: Make, task: Adds, private: PrivateSettings
) -> None:
    secret = await created(hand)
    key = await hand.client.call("GETDEL", hand.keys.sealing)
    live = context()
    async with running(make(private=private), live):
        await hand.open(device=3)
        await wait_until(lambda: task.seen)
        assert await hand.answered() == []
        await hand.client.call("SET", hand.keys.sealing, key)
        [upload] = await answers(hand)
    assert isinstance(upload, Upload)
    assert (await opened(hand, upload, secret))[0] == [1 << POLICY.scale_bits] * 4
    assert len(task.seen) == 1


@pytest.mark.parametrize("forged", ["by another helper", "for another policy", "expired", "junk"])
async def test_nothing_is_sealed_to_another_key(
    hand: Hand, make: Make, private: PrivateSettings, forged: str
) -> None:
    """A writer of Redis puts a key there of which it has the secret."""
    await created(hand)
    secret = EpochSecret.new("x25519")
    other = policy_of(parameters=4, clip=9.0)
    key = {
        "by another helper": secret.announced(POLICY, key_of(5), 1 << 40).encode(),
        "for another policy": secret.announced(other, HELPER, 1 << 40).encode(),
        "expired": secret.announced(POLICY, HELPER, 1_000_000).encode(),
        "junk": b"junk",
    }[forged]
    await hand.client.call("SET", hand.keys.sealing, key)
    async with running(make(private=private), context()):
        await hand.open(device=3)
        [answer] = await answers(hand)
    assert isinstance(answer, GiveUp)
    assert answer.reason == f"raised {'BadMessage' if forged == 'junk' else 'BadSeal'}"
    assert await hand.client.call("KEYS", hand.keys.update("*")) == []


async def test_interrupted_training_leaves_nothing_in_redis_and_starts_over(
    hand: Hand, make: Make, tmp_path: Path
) -> None:
    """A workspace has the device's own model."""
    task, policy = Plain(), policy_of(parameters=10)
    hand.layout = layout_of(task.model())
    private = settings_of(tmp_path, policy)
    await created(hand, policy)
    await stopped_midway(hand, task, make("t1", task=task, private=private))
    assert await hand.client.call("KEYS", hand.keys.workspace("pool", "*")) == []
    task.begins()
    async with running(make("t2", task=task, private=private), context()):
        [upload] = await answers(hand)
    assert isinstance(upload, Upload)
    assert task.steps == H


async def test_devices_data_is_neither_measured_nor_quoted(
    hand: Hand, make: Make, private: PrivateSettings
) -> None:
    """Device 9 raises, with a text about itself; device 1 has test data, and is asked for it."""
    await created(hand)
    async with running(make(task=Measures(), private=private), context()):
        await hand.open(device=9)
        [answer] = await answers(hand)
        await evaluates(hand, 1)

        async def told() -> list[Event | Measured]:
            rows = await hand.client.call("XRANGE", hand.keys.inbox("pool"), "-", "+")
            said = [decode(row[1][1], Event, Measured, Upload, GiveUp, Presence) for row in rows]
            return [one for one in said if isinstance(one, Event | Measured)]

        await wait_until(lambda: _is_two(told))
        event, measured = await told()
    assert isinstance(answer, GiveUp)
    assert answer.reason == "raised ValueError"
    assert isinstance(event, Event)
    assert isinstance(measured, Measured)
    assert event.text == ""
    assert "device 9 is broken" not in str(event)
    assert (measured.reason, measured.samples, measured.sums) == ("no test data", 0, {})


async def _is_two(told: Any) -> bool:
    return len(await told()) == 2


async def test_local_values_need_a_folder_as_redis_is_read_by_others(
    hand: Hand, make: Make, private: PrivateSettings, tmp_path: Path
) -> None:
    task = Personal()
    model = initial(task, 0)
    hand.layout, unshared = model.layout, model.layout.unshared
    assert unshared is not None
    await created(hand)
    head = head_of(unshared)
    values = hand.keys.model(head.blob)
    await blobs.write(hand.client, values, unshared.model(), expire_s=60, encoded=head.encoded)
    with pytest.raises(ConfigError, match=r"name a folder for them, trainer\.local_dir"):
        await make(task=task, private=private).run(context())
    at_home = TrainerSettings(local_dir=str(tmp_path / "local"))
    async with running(make("t2", task=task, private=private, settings=at_home), context()):
        await hand.open(device=3)
        [upload] = await answers(hand)
    assert isinstance(upload, Upload)
    assert upload.size == 16
    assert await hand.client.call("KEYS", hand.keys.workspace("pool", "*")) == []


async def test_update_that_is_not_finite_is_sent_as_zeros(
    hand: Hand, make: Make, private: PrivateSettings
) -> None:
    """A task given up would tell the server that its model overflows on this device's data."""
    task = Diverging()
    await created(hand)
    async with running(make(task=task, private=private), context()):
        await hand.open(device=3)
        [answer] = await answers(hand)
    assert isinstance(answer, Upload)
    assert answer.format == "mask32"


class Diverging(Adds):
    """Its first parameter ends at infinity."""

    def train(self, model: nn.Module, data: Any, work: Work) -> Trained:
        with torch.no_grad():
            model.get_parameter("weight")[0] = torch.inf
        return super().train(model, data, work)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("", "is not private, and this trainer sends"),
        (policy_of(parameters=4, clip=9.0).text.decode(), "takes part under its own policy alone"),
    ],
)
async def test_trainer_takes_no_part_in_a_run_without_its_policy(
    hand: Hand, make: Make, private: PrivateSettings, run: str, said: str
) -> None:
    await hand.create(policy=run, sends="delta")
    with pytest.raises(ConfigError, match=said):
        await make(private=private).run(context())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy": None, "owner": None}, "is private: set private.policy"),
        ({"owner": hex_of(key_of(5))}, "not signed by the helper's owner"),
        ({"keys": None}, "private.keys: name the folder"),
        ({"keys": "/nowhere"}, r"private.keys: /nowhere/0.pem: No such file"),
    ],
)
async def test_trainer_needs_policy_owner_and_keys(
    hand: Hand, make: Make, private: PrivateSettings, changes: dict[str, Any], said: str
) -> None:
    await created(hand)
    with pytest.raises(ConfigError, match=said):
        await make(private=private.model_copy(update=changes)).run(context())


async def test_updates_of_a_private_run_have_no_other_format(
    hand: Hand, make: Make, private: PrivateSettings
) -> None:
    await created(hand)
    with pytest.raises(ConfigError, match=r"wire\.update = 'int4' in a private run"):
        await make(private=private, wire=format_of("int4")).run(context())


async def test_model_with_buffers_is_refused_by_name(
    hand: Hand, make: Make, private: PrivateSettings
) -> None:
    task = Steps()
    hand.layout = layout_of(task.model())
    await created(hand)
    with pytest.raises(ConfigError, match=r"1\.running_mean.*keep them on the devices"):
        await make(task=task, private=private).run(context())


async def test_trainer_leaves_a_run_that_was_begun_anew(
    hand: Hand, make: Make, private: PrivateSettings
) -> None:
    """Its updates would be sealed to the earlier run."""
    await created(hand)
    async with running(make(private=private), context(), may_fail=True) as ends:
        await hand.open(device=3)
        await answers(hand)
        await hand.client.call("HSET", hand.keys.run, "lineage", "another")
        await hand.open(device=3)
        with pytest.raises(ExceptionGroup) as ended:
            await asyncio.wait_for(ends, 10)
    assert ended.group_contains(ConfigError, match="was begun anew")
