"""The policy: the document that says which sums a helper may open, and of which devices.

Data owners agree on a policy and hold the roster, the list of the devices' public keys, so that a
server cannot invent devices around a victim. The helper's owner signs the policy. A device pins the
policy's digest when it enrols, and everything that it sends is bound to the digest.

A policy has one text: a document with other spaces, another order of keys or another spelling of a
number is refused. So the digest of the text identifies the policy.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from pydantic import Field, ValidationError, model_validator

from fedstream.core.errors import ConfigError
from fedstream.core.formats import Format
from fedstream.private import KemName
from fedstream.private.correlation import MOST_BANDS, Correlation, correlation
from fedstream.private.noise import LARGEST_SIGMA
from fedstream.runtime.config import Section, check
from fedstream.runtime.process import read_regular

Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # 32 bytes: a SHA-256 or a public key

DEVIATIONS: Final = 12.0  # of the noise within the range; more have a chance below 2**-100
_SIGNED = b"fedstream policy 1\n"
_ROSTER_LINE = re.compile(rb"(0|[1-9][0-9]{0,9}) ([0-9a-f]{64})")


class PrivacyPolicy(Section):
    """What a helper may open. Masked values count units of ``2**-scale_bits``."""

    kind: Literal["fedstream-policy-1"] = "fedstream-policy-1"
    roster: Hex32  # :attr:`KeyRoster.digest`
    helper: Hex32  # Ed25519 public key, by which the helper signs its epochs' keys
    image: str = Field(default="", max_length=200)  # the helper's image by digest, for people
    parameters: Annotated[int, Field(ge=1, lt=1 << 31)]  # values of an update
    clip: Annotated[float, Field(gt=0, le=1e9)]  # S: largest Euclidean norm of an update
    scale_bits: Annotated[int, Field(ge=-32, le=64)]
    word_bits: Literal[16, 24, 32] = 32  # of a masked value
    min_batch: Annotated[int, Field(ge=2)]  # K_min
    max_batch: Annotated[int, Field(ge=2, le=10_000)]
    # By staleness, from 0 on; a staler update is not opened.
    weights: Annotated[tuple[Annotated[int, Field(ge=1, le=1000)], ...], Field(min_length=1)]
    # The noise's standard deviation in multiples of the largest change that one device makes to a
    # sum; 0: no noise, and so no differential privacy.
    sigma: Annotated[float, Field(ge=0, le=1e6)]
    participations: Annotated[int, Field(ge=1)]  # of a device at the largest weight, over all runs
    # A sum's noise takes back a part of that of the bands - 1 sums before it in its run, so a
    # device takes part in at most one of ``bands`` sums in a row. 1: independent noise.
    bands: Annotated[int, Field(ge=1, le=MOST_BANDS)] = 1
    kem: KemName = "x25519"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.max_batch < self.min_batch:
            raise ValueError(f"max_batch must be at least min_batch ({self.min_batch})")
        if self.bands > 1 and not self.sigma:
            raise ValueError(f"bands = {self.bands} needs noise: set sigma, or leave bands out")
        most = LARGEST_SIGMA << (self.correlation.bits // 2)
        if self.noise_sigma > most:
            raise ValueError(
                f"the noise is drawn with sigma {self.noise_sigma:.0f}, at most {most}: lower "
                "scale_bits"
            )
        heaviest = self.max_batch * max(self.weights)
        largest = heaviest * self.norm_bound + self.correlation.rounding
        if largest + DEVIATIONS * self.sum_sigma >= 1 << (self.word_bits - 1):
            raise ValueError(
                f"a sum of {self.max_batch} updates with noise may not fit {self.word_bits} bits: "
                "lower scale_bits, sigma or max_batch, or take more word_bits"
            )
        return self

    @property
    def norm_bound(self) -> int:
        """S': largest norm of a rounded update, in units.

        Kairouz, Liu and Steinke (2021), theorem 1 with beta = exp(-1/2): stochastic rounding
        stays within it with a probability of at least 1 - beta, whatever the update.
        """
        clip, root = math.ldexp(self.clip, self.scale_bits), math.sqrt(self.parameters)
        square = clip**2 + root**2 / 4 + (clip + root / 2)  # sqrt(2 ln(1 / beta)) is 1
        return math.ceil(min(clip + root, math.sqrt(square)))

    @property
    def format(self) -> Format:
        """The wire format of masked updates and of masks."""
        return Format("mask", word_bits=self.word_bits)

    @property
    def correlation(self) -> Correlation:
        """How the noise of a run's sums hangs together."""
        return correlation(self.bands)

    @property
    def noise_sigma(self) -> float:
        """Parameter of the discrete Gaussian that is drawn, in the correlation's steps.

        At one band, a step is a unit, and what is drawn is a sum's noise.
        """
        return self.sigma * max(self.weights) * self.norm_bound * self.correlation.norm

    @property
    def sum_sigma(self) -> float:
        """Standard deviation of a sum's noise, in units."""
        return math.ldexp(self.noise_sigma, -self.correlation.bits) * self.correlation.gain

    @property
    def allowance(self) -> int:
        """Most that the squares of a device's weights may add up to, over all opened batches."""
        return int(self.participations * max(self.weights) ** 2)

    def sum_bound(self, total_weight: int) -> int:
        """Largest norm of an honest batch's opened sum, in units.

        Exceeded with a probability below 2**-100: the norm of a sub-Gaussian vector (Hsu, Kakade
        and Zhang 2012, theorem 2.1, with exp(-t) = exp(-72)).
        """
        root = math.sqrt(self.parameters)
        noise = self.sum_sigma * (root + DEVIATIONS) + self.correlation.rounding * root
        return total_weight * self.norm_bound + math.ceil(noise)

    @property
    def text(self) -> bytes:
        """The policy's only text: JSON with sorted keys and without spaces."""
        table = self.model_dump(mode="json", exclude={"bands"} if self.bands == 1 else None)
        return json.dumps(table, sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> str:
        """SHA-256 of the text, in hexadecimal."""
        return hashlib.sha256(self.text).hexdigest()

    @classmethod
    def finest(cls, **keys: Any) -> PrivacyPolicy:
        """The policy of the other keys with the largest ``scale_bits`` whose sums fit.

        Raises pydantic's ValidationError if a key is invalid, or if none fits.
        """
        lowest, *others = range(-32, 65)
        found = cls(scale_bits=lowest, **keys)
        for bits in others:
            try:
                found = cls(scale_bits=bits, **keys)
            except ValidationError:
                break
        return found

    @classmethod
    def parsed(cls, text: bytes, at: str) -> PrivacyPolicy:
        """Read a policy's text. ``at``: its place, for errors. Raises ConfigError."""
        policy = check(cls, _object_in(text, at), "policy")
        if policy.text != text:
            raise ConfigError(
                f"{at}: the policy is not in its canonical form, so its digest would not be that "
                "of what you read: write it by PrivacyPolicy.text"
            )
        return policy


def _object_in(text: bytes, at: str) -> Mapping[str, object]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{at}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{at}: expected a JSON object with a policy's keys")
    return found


def public_key(text: str) -> Ed25519PublicKey:
    """An Ed25519 public key from its 64 hexadecimal digits."""
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))


def private_key(pem: bytes, at: str) -> Ed25519PrivateKey:
    """Read an Ed25519 private key (PEM). ``at``: its place, for errors. Raises ConfigError."""
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{at}: not an Ed25519 private key in PEM without a password")
    return key


def signed(policy: PrivacyPolicy, owner: Ed25519PrivateKey) -> bytes:
    """A policy's file: its text, and in a second line its owner's signature."""
    return policy.text + b"\n" + owner.sign(_SIGNED + policy.text).hex().encode() + b"\n"


def read_signed(data: bytes, owner: Ed25519PublicKey, at: str) -> PrivacyPolicy:
    """Read what :func:`signed` wrote. ``at``: its place, for errors. Raises ConfigError."""
    text, _, signature = data.partition(b"\n")
    try:
        owner.verify(bytes.fromhex(signature.decode().strip()), _SIGNED + text)
    except (InvalidSignature, ValueError):
        raise ConfigError(
            f"{at}: the policy is not signed by the helper's owner: get it again, or the owner's "
            "public key"
        ) from None
    return PrivacyPolicy.parsed(text, at)


def read_policy(file: Path, owner: Ed25519PublicKey, at: str) -> PrivacyPolicy:
    """Read the file of a signed policy. ``at``: its place, for errors. Raises ConfigError."""
    try:
        data = read_regular(file)
    except OSError as error:
        raise ConfigError(f"{at}: {error.strerror}") from error
    return read_signed(data, owner, at)


@dataclass(frozen=True)
class KeyRoster:
    """The devices' public keys, by device: raw Ed25519, 32 bytes each.

    A text of one line a device, its number and its key in hexadecimal, in the order of the numbers.
    """

    keys: Mapping[int, bytes]

    @property
    def text(self) -> bytes:
        """The roster's only text."""
        return "".join(
            f"{device} {self.keys[device].hex()}\n" for device in sorted(self.keys)
        ).encode()

    @property
    def digest(self) -> str:
        """SHA-256 of the text, in hexadecimal."""
        return hashlib.sha256(self.text).hexdigest()

    @classmethod
    def of(cls, keys: Sequence[Ed25519PublicKey]) -> KeyRoster:
        """A roster of devices 0, 1, ..."""
        return cls({device: key.public_bytes_raw() for device, key in enumerate(keys)})

    @classmethod
    def parsed(cls, text: bytes, at: str) -> KeyRoster:
        """Read a roster's text. ``at``: its place, for errors. Raises ConfigError."""
        keys: dict[int, bytes] = {}
        owners: dict[bytes, int] = {}
        for number, line in enumerate(text.splitlines(), 1):
            here = f"{at}, line {number}"
            read = _ROSTER_LINE.fullmatch(line)
            try:
                found, raw = (int(read[1]), bytes.fromhex(read[2].decode())) if read else (0, b"")
                Ed25519PublicKey.from_public_bytes(raw)
            except ValueError:
                raise ConfigError(
                    f"{here}: expected a device's number, a space and its Ed25519 public key in "
                    "64 hexadecimal digits, in lower case"
                ) from None
            if keys and found <= max(keys):
                raise ConfigError(f"{here}: device {found} is not in the order of the numbers")
            if raw in owners:
                raise ConfigError(
                    f"{here}: device {found} has the key of device {owners[raw]}: one device could "
                    "fill a batch"
                )
            keys[found], owners[raw] = raw, found
        roster = cls(keys)
        if roster.text != text:
            raise ConfigError(f"{at}: end each line, also the last one, with a line feed")
        return roster
