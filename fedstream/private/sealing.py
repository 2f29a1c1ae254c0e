"""Sealed updates: what a device hands to the server for the helper, and which of them are opened.

A device masks its update with a seed, seals the seed to the key of the helper's epoch (HPKE,
RFC 9180) and signs the whole (Ed25519). HPKE's ``info`` and the signature bind the seed to its run,
task, attempt, device, version tau, model layout, policy, epoch and masked bytes. So nothing that a
device sent serves in another place, and nobody else can make such a message. A retry must be sealed
anew, by :func:`seal`, with another seed.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, get_args

import msgpack
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import (
    AEAD,
    KDF,
    KEM,
    MLKEM768X25519PrivateKey,
    MLKEM768X25519PublicKey,
    Suite,
)
from numpy.typing import NDArray
from pydantic import Field

from fedstream.core.errors import FedstreamError
from fedstream.core.messages import Count, Id, Message, Name
from fedstream.core.words import MaskWords
from fedstream.private import KemName
from fedstream.private.masks import SEED_BYTES, masked, packed
from fedstream.private.policy import Hex32, PrivacyPolicy

SUITES: Final = {
    "x25519": Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_128_GCM),
    "mlkem768-x25519": Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_128_GCM),
}
_X25519_BYTES = 32
# Headers of a helper's answers.
INTENT_HEADER: Final = "Fedstream-Intent"  # of a sum of masks: its intent's digest
EPOCHS_HEADER: Final = "Fedstream-Epochs"  # of the key: epochs that can be opened, oldest first
Signature64 = Annotated[bytes, Field(min_length=64, max_length=64)]


class BadSeal(FedstreamError):
    """A sealed update, or an epoch's key, that is not what its signer made."""


class EpochKey(Message):
    """The public key of a helper's epoch, to which devices seal; signed by the policy's helper."""

    kind: ClassVar[str] = "epoch key"
    epoch: Id
    policy: Hex32
    until: Count  # seconds since 1970; the secret half is deleted then
    public: Annotated[bytes, Field(max_length=2000)]
    signature: Signature64

    def check(self, policy: PrivacyPolicy, now: float) -> None:
        """Check, on a device, that the helper of ``policy`` uses this key now. Raises BadSeal."""
        if self.policy != policy.digest:
            raise BadSeal(f"the helper's key is for policy {self.policy}, ours is {policy.digest}")
        said = "the epoch's key is not the helper's"
        _verify(policy.helper, self.signature, self.signed, said)
        if now >= self.until:
            raise BadSeal(
                "the epoch's key has expired: fetch the helper's newest, or set the clock"
            )

    @property
    def signed(self) -> bytes:
        """The bytes that the helper signs."""
        about = [self.epoch, self.policy, self.until, self.public]
        return b"fedstream epoch 1\0" + _packed(about)


@dataclass(frozen=True)
class EpochSecret:
    """What opens the sealed updates of an epoch, and selects its noise."""

    epoch: str
    # X25519's 32 bytes, behind those of ML-KEM's seed if the policy is hybrid.
    private: bytes = field(repr=False)
    noise: bytes = field(repr=False)  # key of :func:`fedstream.private.noise.noise_key`

    @classmethod
    def new(cls, kem: KemName) -> EpochSecret:
        """A secret of an epoch that begins."""
        private = X25519PrivateKey.generate().private_bytes_raw()
        if kem == "mlkem768-x25519":
            private = MLKEM768PrivateKey.generate().private_bytes_raw() + private
        return cls(os.urandom(16).hex(), private, os.urandom(32))

    def announced(self, policy: PrivacyPolicy, helper: Ed25519PrivateKey, until: int) -> EpochKey:
        """The public half, signed by the helper's key."""
        public = b"".join(one.public_key().public_bytes_raw() for one in self._keys)
        unsigned = EpochKey(
            epoch=self.epoch,
            policy=policy.digest,
            until=until,
            public=public,
            signature=bytes(64),
        )
        return unsigned.model_copy(update={"signature": helper.sign(unsigned.signed)})

    def seed_of(self, update: SealedUpdate, kem: KemName) -> bytes:
        """Open the seed of an update. Raises BadSeal."""
        *first, last = self._keys
        private = MLKEM768X25519PrivateKey(first[0], last) if first else last
        try:
            seed = SUITES[kem].decrypt(update.seed, private, update.bound)
        except InvalidTag:
            raise BadSeal(
                f"task {update.task}: the seed was not sealed for this update and this epoch"
            ) from None
        if len(seed) != SEED_BYTES:
            raise BadSeal(f"task {update.task}: a seed of {len(seed)} bytes, not {SEED_BYTES}")
        return seed

    @cached_property
    def _keys(self) -> tuple[Any, ...]:
        last = X25519PrivateKey.from_private_bytes(self.private[-_X25519_BYTES:])
        first = self.private[:-_X25519_BYTES]
        return (MLKEM768PrivateKey.from_seed_bytes(first), last) if first else (last,)


class SealedUpdate(Message):
    """The part of a device's answer that is for the helper, beside the masked update itself."""

    kind: ClassVar[str] = "sealed update"
    run: Name  # its lineage, which no other run has
    task: Id
    attempt: Id
    device: Count
    tau: Count  # the version from which the device trained
    layout: Name
    policy: Hex32
    epoch: Id
    masked: Hex32  # SHA-256 of the packed masked update
    seed: Annotated[bytes, Field(max_length=2000)]  # sealed
    signature: Signature64

    @property
    def bound(self) -> bytes:
        """What the seed is bound to: HPKE's ``info``."""
        about = [self.run, self.task, self.attempt, self.device, self.tau]
        return b"fedstream seed 1\0" + _packed(
            [*about, self.layout, self.policy, self.epoch, self.masked]
        )

    @property
    def signed(self) -> bytes:
        """The bytes that the device signs."""
        return b"fedstream update 1\0" + _packed([self.bound, self.seed])

    def check(self, key: bytes) -> None:
        """Check that the holder of an Ed25519 key (32 bytes) made this message. Raises BadSeal."""
        said = f"task {self.task} is not signed by device {self.device} of the roster"
        _verify(key.hex(), self.signature, self.signed, said)


def seal(
    values: NDArray[Any],
    policy: PrivacyPolicy,
    key: EpochKey,
    device_key: Ed25519PrivateKey,
    *,
    run: str,
    task: str,
    attempt: str,
    device: int,
    tau: int,
    layout: str,
    now: float | None = None,
) -> tuple[bytes, SealedUpdate]:
    """Mask a rounded update by a fresh seed; return the packed words and the sealed update.

    Every call draws another seed: call it again for every attempt, since two updates by one seed
    give their difference away. ``now``: seconds since 1970; None: by this machine's clock. Raises
    BadSeal if ``key`` is not of the policy's helper, or too old.
    """
    key.check(policy, time.time() if now is None else now)
    seed = os.urandom(SEED_BYTES)
    words: MaskWords = masked(values, seed)
    data = packed(words, policy)
    unsigned = SealedUpdate(
        run=run,
        task=task,
        attempt=attempt,
        device=device,
        tau=tau,
        layout=layout,
        policy=policy.digest,
        epoch=key.epoch,
        masked=hashlib.sha256(data).hexdigest(),
        seed=b"",
        signature=bytes(64),
    )
    public = _public(key.public, policy.kem)
    sealed = unsigned.model_copy(
        update={"seed": SUITES[policy.kem].encrypt(seed, public, unsigned.bound)}
    )
    return data, sealed.model_copy(update={"signature": device_key.sign(sealed.signed)})


class Intent(Message):
    """A batch that the updater wants opened, as it has journalled it before it asks."""

    kind: ClassVar[str] = "intent"
    run: Name
    policy: Hex32
    version: Count  # from which the staleness of the updates counts
    updates: tuple[SealedUpdate, ...]
    weights: tuple[int, ...]  # of the updates, in their order

    @property
    def digest(self) -> str:
        """SHA-256 over everything in the intent: it identifies the batch and selects its noise."""
        updates = [[one.signed, one.signature] for one in self.updates]
        about = [self.run, self.policy, self.version, updates, self.weights]
        return hashlib.sha256(b"fedstream intent 1\0" + _packed(about)).hexdigest()


# Why a helper refuses to open an intent.
OpenRefusal: TypeAlias = Literal[
    "malformed",  # not an intent, or too long
    "policy",  # another one than ours, for the intent or an update
    "too few",  # updates: fewer than min_batch
    "too many",  # updates: more than max_batch
    "weights",  # not the policy's for the staleness, or too unequal
    "mixed",  # updates of several runs or layouts
    "twice",  # a device or a task is named twice
    "not in roster",  # a device without a key in the data owners' roster
    "signature",  # not the device's
    "seal",  # a seed that was sealed for another update
    "helper lost",  # sealed to an epoch whose key is gone, or opened with noise that is gone
    "overlap",  # a task was opened in another batch
    "participation",  # a device would exceed the policy's limit
    "too soon",  # a device was in a batch whose noise is taken back now
]
REFUSALS: Final[tuple[OpenRefusal, ...]] = get_args(OpenRefusal)


def _public(raw: bytes, kem: KemName) -> Any:
    try:
        last = X25519PublicKey.from_public_bytes(raw[-_X25519_BYTES:])
        if kem == "x25519":
            X25519PublicKey.from_public_bytes(raw)  # has no other bytes
            return last
        first = MLKEM768PublicKey.from_public_bytes(raw[:-_X25519_BYTES])
        return MLKEM768X25519PublicKey(first, last)
    except ValueError:
        raise BadSeal(f"the epoch's key is not a public key of {kem}") from None


def _verify(public: str, signature: bytes, data: bytes, said: str) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(signature, data)
    except (InvalidSignature, ValueError):
        raise BadSeal(said) from None


def _packed(values: list[Any]) -> bytes:
    """The only msgpack of nested lists of texts, bytes and integers."""
    data = msgpack.packb(values)
    assert isinstance(data, bytes)  # noqa: S101  (packb's type is Any)
    return data
