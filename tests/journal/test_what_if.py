"""Another rule on the recorded updates, also one that takes what the devices did not send."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstream.core.layout import Model
from fedstream.core.messages import Upload
from fedstream.journal import Taken
from fedstream.journal.base_models import BaseModels
from fedstream.journal.replay import Replayer
from fedstream.strategies import (
    AcedSettings,
    AfaCdSettings,
    AfaCsSettings,
    Ca2flSettings,
    FadasSettings,
    FedAsyncSettings,
    FedAvgSettings,
    FedBuffSettings,
    Strategy,
)
from fedstream.strategies.adapt import Adapt
from fedstream.strategies.staleness import Constant, Hinge, Polynomial
from tests.journals import LAYOUT, Scribe
from tests.support import layout_of
from tests.updater.states import upload_of

HALF = FedAsyncSettings(alpha=0.5, staleness=Constant())


class Told(Scribe):
    """A scribe whose models hold one number everywhere: those told, in order."""

    def __init__(self, folder: Path, strategy: Strategy, numbers: list[float]) -> None:
        self._numbers = iter(numbers)
        super().__init__(folder, strategy)

    def drawn(self) -> Model:
        """The next model."""
        model = super().drawn()
        model.floats[:] = next(self._numbers)
        return model


def models(folder: Path, rule: Strategy, **options: Any) -> list[float]:
    """The first float of every version that a rule makes of a journal."""
    with Replayer(folder, strategy=rule, **options) as replayer:
        return [m.model.floats[0].item() for m in replayer if m.step.made is not None]


def four_models(folder: Path) -> None:
    """0; then 4 and 6, both trained from 0; 8, trained from version 1; 2, trained from version 3.

    With alpha = 1/2, versions 0 to 4 are 0, 2, 4, 6, 4. So the devices moved by 4, 6, 6 and -4.
    """
    scribe = Told(folder, HALF, [0, 4, 6, 8, 2])
    for device, late in enumerate((0, 1, 1, 0)):
        scribe.update(device, late=late)
    scribe.close()


@pytest.mark.parametrize(
    ("rule", "made"),
    [
        (HALF, [2, 4, 6, 4]),
        (FedBuffSettings(buffer_size=2), [5, 6]),  # + (4 + 6) / 2, + (6 - 4) / 2
        (FedBuffSettings(buffer_size=4, server_lr=0.5), [1.5]),
        # gamma H = 0.1 * 5: the mean gradients are twice as large
        (AfaCdSettings(buffer_size=2, server_lr=0.1), [1.0, 1.2]),
        (AfaCsSettings(buffer_size=2, server_lr=0.1), [0.2, 0.44]),  # over all ten devices
        # + (4 + 6) / 2; + the mean cache of ten devices, (4 + 6) / 10, + (6 - 4) / 2
        (Ca2flSettings(buffer_size=2), [5, 7]),
        # the mean gradient of the last two: 8; 10; 12; (12 - 8) / 2
        (AcedSettings(max_age=1), [0.8, 1.8, 3.0, 3.2]),
        (FadasSettings(buffer_size=2, server_lr=0.5), [0.5, 0.5 + 0.275 / 0.2575**0.5]),
        (FedAvgSettings(clients_per_round=2), [(4 + 6) / 2]),  # 8 is late; 2 waits for another
    ],
)
def test_known_answers_from_recorded_models(
    folder: Path, rule: Strategy, made: list[float]
) -> None:
    four_models(folder)
    assert models(folder, rule) == pytest.approx(made, rel=1e-6)


@pytest.mark.parametrize(
    ("rule", "made"),
    [
        (FedBuffSettings(buffer_size=2), [13, 15]),
        (Ca2flSettings(buffer_size=2), [13, 13 + (2 + 4) / 10 + (1 + 3) / 2]),
        # 10 + 2 = 12; 10 + 4 = 14; 13 + 1 = 14; 10 + 3 = 13
        (FedAsyncSettings(alpha=0.5, staleness=Constant()), [11, 12.5, 13.25, 13.125]),
        (FedAvgSettings(clients_per_round=2), [13]),  # of 12 and 14; 14 waits; 13 is late
    ],
)
def test_known_answers_from_recorded_deltas(
    folder: Path, rule: Strategy, made: list[float]
) -> None:
    """Version 0 is 10; devices moved by 2 and 4 (version 1: 13), 1, and 3 from version 0 again."""
    scribe = Told(folder, FedBuffSettings(buffer_size=2), [10, 2, 4, 1, 3])
    for device, late in enumerate((0, 0, 0, 1)):
        scribe.update(device, late=late)
    scribe.close()
    assert models(folder, rule) == pytest.approx(made, rel=1e-6)


ARRIVALS = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(0, 9), st.integers(0, 6)),
        st.just(("refuse",)),
        st.just(("segment",)),
    ),
    min_size=1,
    max_size=25,
)


@given(
    arrivals=ARRIVALS,
    staleness=st.sampled_from([Constant(), Polynomial(), Hinge(a=1.0, b=1)]),
    alpha=st.sampled_from([0.1, 0.4, 1.0]),
    begin=st.integers(0, 5),
)
@settings(max_examples=40)
def test_fedbuff_of_one_steps_by_what_each_device_did(
    tmp_path_factory: pytest.TempPathFactory,
    arrivals: list[Any],
    staleness: Any,
    alpha: float,
    begin: int,
) -> None:
    """x + alpha s(d) (x_new - x_tau), bit for bit, from wherever the replay begins."""
    folder = tmp_path_factory.mktemp("journal")
    scribe = Scribe(folder, FedAsyncSettings(), layout=layout_of(5, 2, 1))
    xs = [scribe.progress.state.model.copy()]
    for what, *about in arrivals:
        if what == "update":
            scribe.update(about[0], late=about[1])
            xs.append(scribe.progress.state.model.copy())
        elif what == "refuse":
            scribe.refuse()
        else:
            scribe.segment()
    scribe.close()
    begin = min(begin, scribe.version)
    x = xs[begin].parameters.copy()
    rule = FedBuffSettings(buffer_size=1, server_lr=alpha, staleness=staleness)
    with Replayer(folder, strategy=rule, from_version=begin, beside=bool(begin % 2)) as replayer:
        for moment in replayer:
            assert isinstance(moment.message, Taken)
            assert moment.unused == ""
            if moment.message.outcome == "applied":
                new, upload = moment.update(), moment.message.upload
                assert moment.base is not None
                assert moment.base.digest() == xs[upload.tau].digest() == upload.base
                moved = new.parameters - xs[upload.tau].parameters
                s = staleness(moment.message.version - 1 - upload.tau)
                assert moment.step.decision is not None
                assert moment.step.decision.weight == s
                x = x + (moved * np.float32(s)) * np.float32(alpha)
                assert moment.model.buffers.tolist() == new.buffers.tolist()
            assert moment.model.parameters.tolist() == x.tolist()


@pytest.mark.parametrize("recorded", [HALF, FedBuffSettings(buffer_size=1)])
def test_update_without_its_base_is_counted(folder: Path, recorded: Strategy) -> None:
    """The journal's beginning is gone, and with it what two updates were trained from."""
    scribe = Scribe(folder, recorded)
    for _ in range(3):
        scribe.update()
    scribe.segment()
    for late in (0, 2, 4, 1):
        scribe.update(late=late)
    scribe.close()
    other = FedBuffSettings(buffer_size=1) if recorded is HALF else HALF
    with Replayer(folder, strategy=other, from_version=3) as replayer:
        whole = [(moment.unused, moment.version) for moment in replayer]
    assert whole == [("", 4), ("", 5), ("", 6), ("", 7)]  # versions before 3 are looked up too
    (folder / "00000001-000000.journal").unlink()
    with Replayer(folder, strategy=other, beside=True) as replayer:
        moments = [(m.unused, m.version, m.step.decision is None) for m in replayer]
    assert moments == [("", 4, False), ("no_base", 4, True), ("no_base", 4, True), ("", 5, False)]
    with Replayer(folder, strategy=recorded) as replayer:  # which needs none
        assert Counter(moment.unused for moment in replayer) == {"": 4}


def test_base_that_was_replaced_is_not_the_base(folder: Path) -> None:
    """After a model was adopted from Redis, versions may be of another line."""
    scribe = Scribe(folder, HALF)
    scribe.update()
    scribe.adopt()
    scribe.update()
    scribe.update(late=1, base="of a version that was lost")
    scribe.close()
    with Replayer(folder, strategy=FedBuffSettings(buffer_size=1)) as replayer:
        assert [moment.unused for moment in replayer] == ["", "", "no_base"]


def test_update_that_does_not_fit_the_rule_is_counted(folder: Path) -> None:
    scribe = Scribe(folder, HALF)
    scribe.update(1, steps=0)
    scribe.update(2)
    scribe.update(3)
    scribe.close()
    rule = AfaCdSettings(buffer_size=1)
    with Replayer(folder, strategy=rule, without=frozenset({3})) as replayer:
        assert [moment.unused for moment in replayer] == ["unfit", "", "left_out"]


@pytest.mark.parametrize("other", [FedBuffSettings(buffer_size=4), AfaCdSettings(buffer_size=4)])
def test_batches_are_as_large_as_the_other_rule_says(folder: Path, other: Strategy) -> None:
    """Without rounds, the recorded rule's batches do not end the other's."""
    scribe = Scribe(folder, FedBuffSettings(buffer_size=2))
    for _ in range(8):
        scribe.update()
    scribe.close()
    with Replayer(folder, strategy=other) as replayer:
        made = [len(moment.step.made) for moment in replayer if moment.step.made is not None]
    assert made == [4, 4]


def test_recorded_rounds_end_the_other_rules_batches(folder: Path) -> None:
    scribe = Scribe(folder, FedBuffSettings(buffer_size=2, max_staleness=0))
    for _ in range(3):
        scribe.update()
    scribe.close_round()
    scribe.close()
    with Replayer(folder, strategy=AfaCdSettings(buffer_size=4)) as replayer:
        made = [len(moment.step.made) for moment in replayer if moment.step.made is not None]
    assert made == [2, 1]


# keeping the models


def upload(tau: int, base: str) -> Upload:
    """An update trained from this version."""
    return upload_of("t", tau=tau, base=base)


def number(value: float) -> Model:
    """A model that is this number everywhere."""
    model = Model(LAYOUT)
    model.floats[:] = value
    return model


@pytest.mark.parametrize("in_memory", [0, 1 << 20])
def test_a_base_is_kept_for_as_long_as_it_is_needed(in_memory: int) -> None:
    """Version 0 until the very end, the others for one version: never more than three."""
    uploads = [upload(0, "v0"), *(upload(n, f"v{n}") for n in range(50)), upload(0, "v0")]
    bases = BaseModels(uploads, in_memory=in_memory)
    assert bases.oldest == 0
    kept = set()
    for n, one in enumerate(uploads[1:-1]):
        bases.add(n, f"v{n}", number(n))
        bases.add(n + 100, f"v{n + 100}", number(n))  # which nobody needs
        base = bases.of(one)
        assert base is not None
        assert base.floats.tolist() == [n] * LAYOUT.floats
        kept.add(base.buffer.ctypes.data)
    assert len(kept) == 3
    for one in (uploads[0], uploads[-1]):
        zero = bases.of(one)
        assert zero is not None
        assert zero.floats.tolist() == [0.0] * LAYOUT.floats
    assert bases.of(upload(0, "v0")) is None


def test_changes_of_the_step_scale_another_rule_that_adapts(tmp_path: Path) -> None:
    """0 and updates of 8: alpha is .5, then .25. The same changes apply to one that begins at .25,
    and to the recorded rule without a device; a rule that does not adapt ignores them."""
    adapts = HALF.model_copy(update={"adapt": Adapt()})
    scribe = Told(tmp_path, adapts, [0.0, 8.0, 8.0, 8.0])
    scribe.update(1)
    scribe.scale_step(0.5)
    scribe.update(2)
    scribe.update(1)
    scribe.close()
    assert models(tmp_path, adapts) == [4.0, 5.0, 5.75]
    assert models(tmp_path, adapts.model_copy(update={"alpha": 0.25})) == [2.0, 2.75, 3.40625]
    assert models(tmp_path, adapts, without=frozenset({2})) == [4.0, 5.0]
    assert models(tmp_path, HALF) == [4.0, 6.0, 7.0]
