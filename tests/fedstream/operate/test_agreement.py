"""What the parties of a private run agree on is made in one folder, with which a helper starts."""

from __future__ import annotations

import stat
import tomllib
from pathlib import Path

import pytest

from fedstream.core.errors import ConfigError
from fedstream.core.layout import Layout, Tensor
from fedstream.helper.service import HelperService
from fedstream.helper.settings import HelperSettings
from fedstream.operate.agreement import Agreement, agree, in_words
from fedstream.private.policy import KeyRoster, private_key
from fedstream.private.settings import PrivateSettings
from fedstream.runtime.http import HttpSettings
from fedstream.settings.config import read
from fedstream.strategies.private_sums import PrivateSums
from tests.private.enrolled import DEVICES, ROSTER, policy_of

LAYOUT = Layout((Tensor("weight", (50,), "float32", "parameter"),))
FEDBUFF = ["strategy.name=fedbuff", "strategy.buffer_size=4"]
NOISE = ["private.terms.sigma=4", "private.terms.participations=10", "private.terms.clip=2"]


def test_folder_is_what_run_devices_and_helper_need(tmp_path: Path) -> None:
    made = agree(tmp_path / "made", read(None, [*FEDBUFF, *NOISE]), LAYOUT, 6)
    policy = made.policy
    assert (policy.min_batch, policy.max_batch, policy.parameters) == (4, 4, 50)
    assert (policy.sigma, policy.participations, policy.clip) == (4.0, 10, 2.0)
    private = made.of_run(PrivateSettings(delta=1e-6))
    assert private.read() == policy
    assert private.delta == 1e-6, "what else is configured stays"
    secret = [made.folder / "owner.pem", made.folder / "helper.pem"]
    secret += [made.folder / "keys" / f"{device}.pem" for device in range(6)]
    assert {stat.S_IMODE(file.stat().st_mode) for file in secret} == {0o600}
    keys = [private_key(file.read_bytes(), "").public_key() for file in secret[2:]]
    assert KeyRoster.of(keys).digest == policy.roster
    helper = tomllib.loads((made.folder / "helper.toml").read_text())["helper"]
    service = HelperService(HelperSettings(**helper), HttpSettings())
    service.helper.key.check(policy, 0.0)
    assert Agreement.read(made.folder) == made


def test_run_under_the_policy_has_the_private_form_of_its_strategy(tmp_path: Path) -> None:
    settings = read(None, FEDBUFF)
    made = agree(tmp_path / "made", settings, LAYOUT, 6)
    settings = settings.model_copy(update={"private": made.of_run(settings.private)})
    assert isinstance(settings.rule, PrivateSums)
    assert settings.rule.terms.policy == made.policy


def test_buckets_are_sums_of_their_part_of_the_batch(tmp_path: Path) -> None:
    made = agree(tmp_path, read(None, [*FEDBUFF, "private.buckets=2"]), LAYOUT, 6)
    assert (made.policy.min_batch, made.policy.max_batch) == (2, 2)


def test_owner_signs_another_policy_by_the_same_key(tmp_path: Path) -> None:
    first = agree(tmp_path, read(None, FEDBUFF), LAYOUT, 6)
    with pytest.raises(ConfigError, match=r"policy\.json exists: name another folder"):
        agree(tmp_path, read(None, FEDBUFF), LAYOUT, 6)
    (tmp_path / "policy.json").unlink()
    second = agree(tmp_path, read(None, [*FEDBUFF, *NOISE]), LAYOUT, 6)
    assert second.owner == first.owner
    assert second.policy.roster == first.policy.roster
    assert second.policy.digest != first.policy.digest


def test_roster_of_devices_that_exist_is_taken_as_it_is(tmp_path: Path) -> None:
    roster = tmp_path / "devices.txt"
    roster.write_bytes(ROSTER.text)
    made = agree(tmp_path / "made", read(None, FEDBUFF), LAYOUT, len(DEVICES), roster)
    assert made.policy.roster == ROSTER.digest
    assert [*(made.folder / "keys").iterdir()] == [], "no key is made for them"
    with pytest.raises(ConfigError, match="has no key of device 40"):
        agree(tmp_path / "more", read(None, FEDBUFF), LAYOUT, len(DEVICES) + 1, roster)


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        ([], "strategy.name = 'fedasync' in a private run: it needs each update alone"),
        (["strategy.name=basgd"], "choose fedbuff, fedavg or afa-cd"),
        ([FEDBUFF[0], "strategy.buffer_size=7"], "strategy.buffer_size = 7, but 6 devices"),
        ([*FEDBUFF, "private.terms.min_batch=5"], "opens sums of 5 to 5 updates"),
        ([*FEDBUFF, *NOISE, "private.terms.bands=2"], "so 8 devices are needed, and 6 take part"),
        ([*FEDBUFF, "private.buckets=3"], "sums of 1 update"),
        ([*FEDBUFF, "private.terms.clip=1e9", "private.terms.word_bits=16"], None),
        ([*FEDBUFF, "private.terms.sigma=1e6", "private.terms.word_bits=16"], "private.terms: "),
        ([*FEDBUFF, "wire.update=bf16"], "wire.update = 'bf16' in a private run"),
    ],
)
def test_what_cannot_be_agreed_on_is_refused_before_any_file_is_written(
    sets: list[str], why: str | None, tmp_path: Path
) -> None:
    if why is None:  # scale_bits give way
        assert agree(tmp_path / "made", read(None, sets), LAYOUT, 6).policy.scale_bits < 0
        return
    with pytest.raises(ConfigError) as caught:
        agree(tmp_path / "made", read(None, sets), LAYOUT, 6)
    assert why in str(caught.value)
    assert not (tmp_path / "made").exists()


def test_model_with_shared_buffers_is_refused(tmp_path: Path) -> None:
    layout = Layout((*LAYOUT.tensors, Tensor("norm.running_mean", (5,), "float32", "buffer")))
    with pytest.raises(ConfigError, match=r"the model has norm\.running_mean"):
        agree(tmp_path / "made", read(None, FEDBUFF), layout, 6)


def test_policy_in_words_says_what_it_bounds() -> None:
    noisy = in_words(policy_of(sigma=4.0, participations=10), 1e-5)
    assert "sums of at least 3 updates of norm 1 at most" in noisy
    assert "epsilon 3.617 at delta 1e-05 for a device in 10 sums" in noisy
    assert "no differential privacy" in in_words(policy_of(sigma=0.0), 1e-5)
    assert "without a bound" in in_words(policy_of(sigma=0.01, participations=10**6), 1e-5)
