"""Sealed updates: RFC 9180 on the wire, and bound to one place by the device that signed them."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedstream.core.errors import BadMessage
from fedstream.private.masks import masked, unpacked
from fedstream.private.policy import PrivacyPolicy
from fedstream.private.sealing import BadSeal, EpochKey, EpochSecret, Intent, SealedUpdate, seal
from tests.private.enrolled import DEVICES, HELPER, key_of, policy_of

POLICY = policy_of()
SECRET = EpochSecret.new("x25519")
UNTIL = 1 << 40
ABOUT: dict[str, Any] = {
    "run": "lineage",
    "task": "task-1",
    "attempt": "a1",
    "device": 4,
    "tau": 7,
    "layout": "layout-digest",
}
VALUES = np.arange(50)
XWING = Path(__file__).parents[1] / "data" / "xwing.txt"


def sealed(
    policy: PrivacyPolicy = POLICY, secret: EpochSecret = SECRET
) -> tuple[bytes, SealedUpdate]:
    return seal(VALUES, policy, secret.announced(policy, HELPER, UNTIL), DEVICES[4], **ABOUT)


class Rfc9180:
    """Base mode with HKDF-SHA256 and AES-128-GCM, from the RFC's text."""

    @staticmethod
    def extract(salt: bytes, suite: bytes, label: bytes, key: bytes) -> bytes:
        return hmac.digest(salt, b"HPKE-v1" + suite + label + key, "sha256")

    @staticmethod
    def expand(prk: bytes, suite: bytes, label: bytes, info: bytes, length: int) -> bytes:
        labeled = length.to_bytes(2) + b"HPKE-v1" + suite + label + info
        return hmac.digest(prk, labeled + b"\x01", "sha256")[:length]

    @classmethod
    def shared(cls, sk: bytes, enc: bytes) -> bytes:
        """Of DHKEM(X25519, HKDF-SHA256)."""
        key = X25519PrivateKey.from_private_bytes(sk)
        dh = key.exchange(X25519PublicKey.from_public_bytes(enc))
        kem = b"KEM" + bytes.fromhex("0020")
        prk = cls.extract(b"", kem, b"eae_prk", dh)
        public = key.public_key().public_bytes_raw()
        return cls.expand(prk, kem, b"shared_secret", enc + public, 32)

    @classmethod
    def open(cls, kem: str, shared: bytes, ciphertext: bytes, info: bytes, aad: bytes) -> bytes:
        suite = b"HPKE" + bytes.fromhex(kem + "0001 0001")
        context = b"\x00" + cls.extract(b"", suite, b"psk_id_hash", b"")
        context += cls.extract(b"", suite, b"info_hash", info)
        secret = cls.extract(shared, suite, b"secret", b"")
        aead = AESGCM(cls.expand(secret, suite, b"key", context, 16))
        nonce = cls.expand(secret, suite, b"base_nonce", context, 12)
        return aead.decrypt(nonce, ciphertext, aad)


def x_wing_shared(seed: bytes, sk: bytes, enc: bytes) -> bytes:
    """Decapsulate by draft-connolly-cfrg-xwing-kem: ML-KEM-768 and X25519, joined by SHA3-256."""
    first = MLKEM768PrivateKey.from_seed_bytes(seed).decapsulate(enc[:-32])
    key = X25519PrivateKey.from_private_bytes(sk)
    second = key.exchange(X25519PublicKey.from_public_bytes(enc[-32:]))
    public = key.public_key().public_bytes_raw()
    joined = first + second + enc[-32:] + public + rb"\.//^" + b"\\"
    return hashlib.sha3_256(joined).digest()


def test_the_tests_own_hpke_opens_the_vector_of_rfc_9180() -> None:
    """Appendix A.1.1. `cryptography` takes no associated data, which each of the vectors has."""
    shared = Rfc9180.shared(
        bytes.fromhex("4612c550263fc8ad58375df3f557aac531d26850903e55a9f23f21d8534e8ac8"),
        bytes.fromhex("37fda3567bdbd628e88668c3c8d7e97d1d1253b6d4ea6d44c150f741f1bf4431"),
    )
    assert shared.hex() == "fe0e18c9f024ce43799ae393c7e8fe8fce9d218875e8227b0187c04e7d2ea1fc"
    found = Rfc9180.open(
        "0020",
        shared,
        bytes.fromhex(
            "f938558b5d72f1a23810b4be2ab4f84331acc02fc97babc53a52ae8218a355a96d8770ac83d07bea87e13c512a"
        ),
        bytes.fromhex("4f6465206f6e2061204772656369616e2055726e"),
        b"Count-0",
    )
    assert found == b"Beauty is truth, truth beauty"


def test_a_seed_is_sealed_by_rfc_9180_and_unmasks_the_update() -> None:
    data, update = sealed()
    assert len(update.seed) == 80
    shared = Rfc9180.shared(SECRET.private, update.seed[:32])
    seed = Rfc9180.open("0020", shared, update.seed[32:], update.bound, b"")
    assert seed == SECRET.seed_of(update, "x25519")
    np.testing.assert_array_equal(unpacked(data, POLICY), masked(VALUES, seed))
    assert update.masked == hashlib.sha256(data).hexdigest()
    update.check(DEVICES[4].public_key().public_bytes_raw())


def test_the_tests_own_x_wing_decapsulates_the_drafts_vector() -> None:
    """The first of Appendix C: its seed, the shared secret, the ciphertext."""
    seed, expected, *rest = map(bytes.fromhex, XWING.read_text().split())
    expanded = hashlib.shake_256(seed).digest(96)
    assert x_wing_shared(expanded[:64], expanded[64:], b"".join(rest)) == expected


def test_a_hybrid_seed_is_sealed_by_x_wing() -> None:
    """In HPKE's suite 0x647a (draft-ietf-hpke-pq)."""
    policy = policy_of(kem="mlkem768-x25519")
    secret = EpochSecret.new("mlkem768-x25519")
    _, update = sealed(policy, secret)
    shared = x_wing_shared(secret.private[:64], secret.private[64:], update.seed[:1120])
    seed = Rfc9180.open("647a", shared, update.seed[1120:], update.bound, b"")
    assert seed == secret.seed_of(update, "mlkem768-x25519")


def test_a_hybrid_seal_is_opened_by_both_keys() -> None:
    policy = policy_of(kem="mlkem768-x25519")
    secret = EpochSecret.new("mlkem768-x25519")
    data, update = sealed(policy, secret)
    assert len(update.seed) == 1168
    seed = secret.seed_of(update, "mlkem768-x25519")
    np.testing.assert_array_equal(unpacked(data, policy), masked(VALUES, seed))
    for damaged in (b"", update.seed[:500], bytes(1168)):
        with pytest.raises(BadSeal):
            secret.seed_of(update.model_copy(update={"seed": damaged}), "mlkem768-x25519")
    other = EpochSecret(secret.epoch, secret.private[:64] + SECRET.private, secret.noise)
    with pytest.raises(BadSeal, match="task task-1: the seed was not sealed"):
        other.seed_of(update, "mlkem768-x25519")


def test_a_retry_has_another_seed() -> None:
    """Else the two masked updates give their difference away."""
    (first, one), (second, two) = sealed(), sealed()
    assert first != second
    assert SECRET.seed_of(one, "x25519") != SECRET.seed_of(two, "x25519")


CHANGES: dict[str, Any] = {
    "run": "other",
    "task": "task-2",
    "attempt": "a2",
    "device": 5,
    "tau": 8,
    "layout": "other",
    "policy": "00" * 32,
    "epoch": "other",
    "masked": "00" * 32,
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_sealed_update_serves_in_no_other_place(field: str) -> None:
    """Neither does its signature hold, nor does the seed open if a thief signs it anew."""
    _, update = sealed()
    moved = update.model_copy(update={field: CHANGES[field]})
    with pytest.raises(BadSeal, match="is not signed by device"):
        moved.check(DEVICES[4].public_key().public_bytes_raw())
    thief = key_of(1000)
    resigned = moved.model_copy(update={"signature": thief.sign(moved.signed)})
    resigned.check(thief.public_key().public_bytes_raw())
    with pytest.raises(BadSeal, match="the seed was not sealed for this update"):
        SECRET.seed_of(resigned, "x25519")


def test_each_field_is_bound() -> None:
    bound = set(SealedUpdate.model_fields) - {"seed", "signature"}
    assert set(CHANGES) == bound


def test_a_secret_is_not_printed() -> None:
    assert repr(SECRET) == f"EpochSecret(epoch={SECRET.epoch!r})"


def test_another_epochs_secret_opens_nothing() -> None:
    _, update = sealed()
    with pytest.raises(BadSeal, match="this epoch"):
        EpochSecret.new("x25519").seed_of(update, "x25519")


def test_a_damaged_seed_is_refused_whatever_its_length() -> None:
    _, update = sealed()
    for seed in (b"", update.seed[:40], update.seed[:-1], bytes(80)):
        with pytest.raises(BadSeal):
            SECRET.seed_of(update.model_copy(update={"seed": seed}), "x25519")


def test_a_seed_of_another_length_is_refused() -> None:
    from fedstream.private.sealing import SUITES

    _, update = sealed()
    public = X25519PrivateKey.from_private_bytes(SECRET.private).public_key()
    short = SUITES["x25519"].encrypt(b"short", public, update.bound)
    with pytest.raises(BadSeal, match="a seed of 5 bytes, not 32"):
        SECRET.seed_of(update.model_copy(update={"seed": short}), "x25519")


def test_a_device_seals_to_its_policys_helper_alone() -> None:
    """A server that passes on a key of its own would open everything."""
    theirs = SECRET.announced(POLICY, key_of(77), UNTIL)
    with pytest.raises(BadSeal, match="the epoch's key is not the helper's"):
        seal(VALUES, POLICY, theirs, DEVICES[4], **ABOUT)
    genuine = SECRET.announced(POLICY, HELPER, UNTIL)
    for change in ({"public": bytes(32)}, {"epoch": "other"}, {"until": UNTIL + 1}):
        swapped = genuine.model_copy(update=change)
        with pytest.raises(BadSeal, match="the epoch's key is not the helper's"):
            seal(VALUES, POLICY, swapped, DEVICES[4], **ABOUT)
    with pytest.raises(BadSeal, match="the epoch's key has expired"):
        seal(VALUES, POLICY, genuine, DEVICES[4], **ABOUT, now=UNTIL)
    with pytest.raises(BadSeal, match="the helper's key is for policy"):
        seal(VALUES, policy_of(sigma=0.5), genuine, DEVICES[4], **ABOUT)


def test_messages_survive_the_wire() -> None:
    _, update = sealed()
    assert SealedUpdate.decode(update.encode()) == update
    key = SECRET.announced(POLICY, HELPER, UNTIL)
    assert EpochKey.decode(key.encode()) == key
    intent = Intent(run="r", policy=POLICY.digest, version=8, updates=(update,), weights=(1,))
    again = Intent.decode(intent.encode())
    assert again == intent
    assert again.digest == intent.digest
    with pytest.raises(BadMessage, match="signature"):
        SealedUpdate.decode(update.encode(signature=b"short"))


def test_everything_in_an_intent_decides_its_digest() -> None:
    (_, one), (_, two) = sealed(), sealed()
    base: dict[str, Any] = {
        "run": "r",
        "policy": POLICY.digest,
        "version": 8,
        "updates": (one, two),
        "weights": (1, 2),
    }
    others = {
        "run": "q",
        "policy": "00" * 32,
        "version": 9,
        "updates": (two, one),
        "weights": (2, 1),
    }
    digests = {Intent(**{**base, key: value}).digest for key, value in others.items()}
    resigned = one.model_copy(update={"signature": bytes(64)})
    digests.add(Intent(**{**base, "updates": (resigned, two)}).digest)
    assert len(digests | {Intent(**base).digest}) == len(others) + 2
