"""Configuration: which layer wins, what is said about a wrong key, dump as load's inverse."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, SecretStr, model_validator

from fedstream.core.errors import ConfigError
from fedstream.runtime.config import Section, dump, load


class FedAsync(Section):
    name: Literal["fedasync"] = "fedasync"
    alpha: float = Field(default=0.6, gt=0, le=1)


class FedBuff(Section):
    name: Literal["fedbuff"] = "fedbuff"
    k: int = Field(default=10, ge=1)


class Poisson(Section):
    kind: Literal["poisson"]
    rate: float = 1.0


class Rounds(Section):
    kind: Literal["rounds"]
    size: int = 10


class Retry(Section):
    first: float = Field(default=0.1, ge=1e-30)
    most: float = 5.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.first > self.most:
            raise ValueError("first must not exceed most")
        return self


class Run(Section):
    name: str = "run"
    seed: int = 0
    out: Path | None = None
    tags: tuple[str, ...] = ()
    weights: dict[str, float] = Field(default_factory=dict)
    port: int | Literal["any"] = "any"
    quick: bool = False


class Sample(Section):
    run: Run = Run()
    strategy: Annotated[FedAsync | FedBuff, Field(discriminator="name")] = FedAsync()
    policies: tuple[Annotated[Poisson | Rounds, Field(discriminator="kind")], ...] = ()
    policy: Annotated[Poisson | Rounds, Field(discriminator="kind")] | None = None
    retry: Retry = Retry()


def load_file(tmp_path: Path, text: str, *sets: str, **environ: str) -> Sample:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return load(Sample, path=path, environ=environ, sets=sets)


def load_sets(*sets: str, **environ: str) -> Sample:
    return load(Sample, path=None, environ=environ, sets=sets)


def refusal(*sets: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_sets(*sets, **environ)
    return str(caught.value)


# Layers


def test_later_layers_override_earlier_ones_per_key(tmp_path: Path) -> None:
    settings = load_file(
        tmp_path,
        '[run]\nname = "file"\nseed = 1\nquick = true\n',
        "run.seed=3",
        FEDSTREAM_RUN__SEED="2",
        FEDSTREAM_RUN__NAME="environment",
    )
    assert settings.run == Run(name="environment", seed=3, quick=True)


def test_names_without_a_double_underscore_are_not_configuration() -> None:
    environ = {"FEDSTREAM_DATA": "/data", "FEDSTREAM_UPDATER_PORT": "tcp://10.0.0.1", "X__Y": "1"}
    assert load(Sample, path=None, environ=environ) == Sample()


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("seed", "7", 7),
        ("quick", "true", True),
        ("name", "plain text, with = and #", "plain text, with = and #"),
        ("name", '"quoted"', "quoted"),
        ("name", "", ""),
        ("name", "1\nlines = 2", "1\nlines = 2"),
        ("name", "0042", "0042"),
        ("name", "true", "true"),
        ("tags", '["a", "b"]', ("a", "b")),
        ("weights", "{a = 1, b = 0.5}", {"a": 1.0, "b": 0.5}),
        ("out", "/tmp/run", Path("/tmp/run")),  # noqa: S108 (nothing is written there)
    ],
)
def test_values_are_parsed_as_toml_or_taken_as_text(key: str, text: str, value: object) -> None:
    assert getattr(load_sets(f"run.{key}={text}").run, key) == value
    assert getattr(load_sets(**{f"FEDSTREAM_RUN__{key.upper()}": text}).run, key) == value


def test_environment_keys_override_a_table_from_the_environment() -> None:
    settings = load_sets(FEDSTREAM_RUN__WEIGHTS__A="2", FEDSTREAM_RUN__WEIGHTS="{a = 1, b = 1}")
    assert settings.run.weights == {"a": 2.0, "b": 1.0}


def test_a_table_replaces_a_value_and_the_last_set_wins() -> None:
    assert load_sets("run=1", "run.seed=2").run.seed == 2
    assert load_sets("run.seed=1", "run.seed=2").run.seed == 2


@pytest.mark.parametrize(
    ("text", "environ", "sets", "tags"),
    [
        ("", {"A": "a"}, (), ("first", "a")),
        ('tags = ["file"]', {"A": "a"}, ("run.tags.z=z",), ("file", "a", "z")),
        ('tags = ["file"]', {"": '["env"]', "A": "a"}, (), ("env", "a")),
        ("", {"A": "a"}, ("run.tags=['alone']",), ("alone",)),
    ],
)
def test_keys_below_a_list_add_items(
    tmp_path: Path, text: str, environ: dict[str, str], sets: tuple[str, ...], tags: tuple[str, ...]
) -> None:
    """So that parts of a deployment that don't know each other can each add theirs."""

    class Tagged(Section):
        tags: tuple[str, ...] = ("first",)

    class Whole(Section):
        run: Tagged = Tagged()

    path = tmp_path / "run.toml"
    path.write_text(f"[run]\n{text}\n")
    given = {f"FEDSTREAM_RUN__TAGS__{name}".rstrip("_"): value for name, value in environ.items()}
    assert load(Whole, path=path, environ=given, sets=sets).run.tags == tags


def test_invalid_added_item_is_named() -> None:
    assert refusal(FEDSTREAM_RUN__TAGS__A="[1]") == (
        "run.tags[0] = [1] (from FEDSTREAM_RUN__TAGS__A): must be a valid string"
    )


def test_changing_the_kind_drops_the_other_kinds_keys(tmp_path: Path) -> None:
    text = '[strategy]\nname = "fedasync"\nalpha = 0.3\n'
    settings = load_file(tmp_path, text, "strategy.name=fedbuff", "strategy.k=3")
    assert settings.strategy == FedBuff(k=3)


def test_repeating_the_kind_keeps_its_keys(tmp_path: Path) -> None:
    text = '[strategy]\nname = "fedasync"\nalpha = 0.3\n'
    assert load_file(tmp_path, text, "strategy.name=fedasync").strategy == FedAsync(alpha=0.3)


def test_name_that_selects_no_alternative_drops_no_keys(tmp_path: Path) -> None:
    settings = load_file(tmp_path, '[run]\nname = "a"\nseed = 4\n', "run.name=b")
    assert settings.run == Run(name="b", seed=4)


def test_table_without_a_name_configures_the_default(tmp_path: Path) -> None:
    assert load_sets("strategy.alpha=0.25").strategy == FedAsync(alpha=0.25)
    assert load_file(tmp_path, "[strategy]\nalpha = 0.25\n").strategy == FedAsync(alpha=0.25)


# Refusals: the key as the user wrote it, the value, what is allowed, the source


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ("strategy={name='fedasync', alpha=2}",),
            "strategy.alpha = 2 (from --set): must be less than or equal to 1",
        ),
        (
            ("retry.first=0",),
            "retry.first = 0 (from --set): must be greater than or equal to 1e-30",
        ),
        (
            ("strategy.name=fedavg",),
            'strategy.name = "fedavg" (from --set): must be one of fedasync, fedbuff',
        ),
        (
            ("strategy.alhpa=0.5",),  # of none: the default's is meant
            "strategy.alhpa = 0.5 (from --set): unknown key; did you mean strategy.alpha?",
        ),
        (
            ("strategy.k=5",),  # not of the default strategy
            "strategy.name: required with strategy.k, which only fedbuff has",
        ),
        (
            ("strategy.name=fedbuff", "strategy.alpha=0.5"),  # the other strategy's
            (
                "strategy.alpha = 0.5 (from --set): unknown key; it belongs to fedasync; "
                "allowed here: name, k"
            ),
        ),
        (
            ("policy.size=5", "policy.rate=1"),
            "policy.kind: required with policy.size, which only rounds has",
        ),
        (
            ("policies=[{}]",),
            "policies[0].kind (from --set): required, but not given; one of poisson, rounds",
        ),
        (
            ("strategy=fedbuff",),
            'strategy = "fedbuff" (from --set): must be a table, as in strategy.name = "fedbuff"',
        ),
        (
            ("policy=rounds",),
            'policy = "rounds" (from --set): must be a table, as in policy.kind = "rounds"',
        ),
        (("run=demo",), 'run = "demo" (from --set): must be a table'),
        (("run.quick=1",), "run.quick = 1 (from --set): must be true or false"),
        (("run.tags=a",), 'run.tags = "a" (from --set): must be a list, as in ["a"]'),
        (("strategy=3",), "strategy = 3 (from --set): must be a table"),
        (("run=3",), "run = 3 (from --set): must be a table"),
        (("seed=3",), "seed = 3 (from --set): unknown key; did you mean run.seed?"),
        (("run.k=3",), "run.k = 3 (from --set): unknown key; did you mean strategy.k?"),
        (
            ("size.x=1",),
            "size (from --set): unknown key; did you mean policy.size?",
        ),
        (("runn.seed=3",), "runn (from --set): unknown key; did you mean run?"),
        (
            ("polici=3",),
            "polici = 3 (from --set): unknown key; did you mean policies?",
        ),  # or policy
        (
            ("retry.zzz=1",),
            "retry.zzz = 1 (from --set): unknown key; allowed here: first, most",
        ),
        (("run.seed='1'",), 'run.seed = "1" (from --set): must be a valid integer'),
        (
            (f"run.seed='{'1' * 90}'",),
            f'run.seed = "{"1" * 79} (from --set): must be a valid integer',
        ),
        (("retry.most=inf",), "retry.most = Infinity (from --set): must be a finite number"),
        (
            ("run.port=some",),
            "run.port = \"some\" (from --set): must be a valid integer or must be 'any'",
        ),
        (('run.tags=["a", 1]',), "run.tags[1] = 1 (from --set): must be a valid string"),
        (
            ("policies=[{kind='rounds'}, {kind='poisson', rat=1}]",),
            "policies[1].rat = 1 (from --set): unknown key; did you mean policies[1].rate?",
        ),
        (("retry.first=9",), "retry (from --set): first must not exceed most"),
    ],
)
def test_error_names_key_value_source_and_what_is_allowed(
    sets: tuple[str, ...], message: str
) -> None:
    assert refusal(*sets) == message


def test_a_missing_key_is_named() -> None:
    class Strict(Section):
        run: Run
        seed: int

    with pytest.raises(ConfigError) as caught:
        load(Strict, path=None, environ={})
    assert str(caught.value).splitlines() == [
        "run: required, but not given",
        "seed: required, but not given",
    ]


def test_an_empty_list_is_refused_in_the_users_terms() -> None:
    """Pydantic's own message has its word "validation"."""

    class Root(Section):
        devices: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)

    with pytest.raises(ConfigError) as error:
        load(Root, path=None, environ={}, sets=["devices=[]"])
    assert str(error.value) == "devices = [] (from --set): must have at least 1 item, not 0"


def test_error_shows_only_the_first_of_many() -> None:
    """Each takes time, and nobody reads a thousand."""

    class Many(Section):
        numbers: tuple[int, ...] = ()

    wrong = [f"numbers={['x'] * 1000}"]
    with pytest.raises(ConfigError) as error:
        load(Many, path=None, environ={}, sets=wrong)
    *first, last = str(error.value).splitlines()
    assert [line.partition(" ")[0] for line in first] == [f"numbers[{n}]" for n in range(20)]
    assert last == "and 980 more"


def test_error_across_tables_names_no_key() -> None:
    class Whole(Section):
        seed: int = 0

        @model_validator(mode="after")
        def _odd(self) -> Self:
            if self.seed % 2:
                raise ValueError("seed must be even")
            return self

    with pytest.raises(ConfigError, match=r"^configuration \(from --set\): seed must be even$"):
        load(Whole, path=None, environ={}, sets=["seed=1"])


def test_short_secret_is_not_shown_and_counted_in_characters() -> None:
    class Registry(Section):
        token: SecretStr | None = Field(default=None, min_length=16)

    with pytest.raises(
        ConfigError, match=r"^token \(from --set\): must have at least 16 characters$"
    ):
        load(Registry, path=None, environ={}, sets=["token='hush'"])


def test_every_invalid_key_gets_a_line_with_its_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_file(tmp_path, "[run]\nseed = 'x'\n", "retry.most=no", FEDSTREAM_RUN__QUICK="2")
    assert str(caught.value).splitlines() == [
        f'run.seed = "x" (from {tmp_path}/run.toml): must be a valid integer',
        "run.quick = 2 (from FEDSTREAM_RUN__QUICK): must be true or false",
        'retry.most = "no" (from --set): must be a valid number',
    ]


def test_missing_or_malformed_file_is_an_error(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot be read: No such file"):
        load(Sample, path=missing, environ={})
    with pytest.raises(ConfigError, match=r"run\.toml: not valid TOML: .*line 2"):
        load_file(tmp_path, "[run]\nseed = = 1\n")


def test_environment_with_invalid_utf8_is_an_error() -> None:
    latin = b"caf\xe9".decode("utf-8", "surrogateescape")  # what os.environ makes of it
    assert refusal(FEDSTREAM_RUN__NAME=latin) == "FEDSTREAM_RUN__NAME: not valid UTF-8"


@pytest.mark.parametrize("key", ["run.n\udce9me", "run.\udce9"])
def test_key_with_invalid_utf8_is_an_error(key: str) -> None:
    assert refusal(f"{key}=1") == "--set: not valid UTF-8"
    name = "FEDSTREAM_" + key.upper().replace(".", "__")
    assert refusal(**{name: "1"}) == name.replace("\udce9", r"\udce9") + ": not valid UTF-8"


@pytest.mark.parametrize("deep", ["[" * 5000, "{a=" * 5000])
def test_excessive_nesting_is_a_one_line_error(tmp_path: Path, deep: str) -> None:
    said = "configuration: a key or a value is nested too deeply"
    assert refusal(f"run.name={deep}") == said
    assert refusal(".".join("a" * 5000) + "=1") == said
    with pytest.raises(ConfigError, match=said):
        load_file(tmp_path, f"a = {deep}")


@pytest.mark.parametrize("number", ["9" * 5000, "0x" + "f" * 5000])
def test_number_with_thousands_of_digits_is_rejected(number: str) -> None:
    said = refusal(f"run.seed={number}")
    assert "\n" not in said
    assert len(said) < 200


pieces = st.sampled_from(
    ["run", "seed", "name", "strategy", "alpha", "policies", "policy", "kind", "tags", "weights"]
)
keys = st.lists(pieces | st.text(max_size=3), max_size=4)
values = st.sampled_from(
    [
        "1",
        "'a'",
        "[",
        "[1, 'a']",
        "{}",
        "{kind='rounds'}",
        "[{kind=1}]",
        "nan",
        "-inf",
        "1e999",
        "2020-01-01",
        "07:00:00",
        "true",
        "{name='fedasync', k=1}",
        "'\\u0000'",
        "\n",
        "1\nrun=2",
    ],
) | st.text(max_size=5)


@given(st.lists(st.tuples(keys, values), max_size=3), st.booleans())
def test_any_input_gives_settings_or_a_config_error(
    given: list[tuple[list[str], str]], by_environment: bool
) -> None:
    try:
        if by_environment:
            load_sets(**{"FEDSTREAM_" + "__".join(key).upper(): value for key, value in given})
        else:
            load_sets(*(f"{'.'.join(key)}={value}" for key, value in given))
    except ConfigError:
        return


@pytest.mark.parametrize("item", ["run.seed", "=1", ""])
def test_set_without_key_and_value_is_an_error(item: str) -> None:
    assert refusal(item).startswith(f"--set {item}: expected key=value")


# dump

finite = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(st.characters(codec="utf-8"))
integers = st.integers(-(2**63), 2**63 - 1)
policies = st.one_of(
    st.builds(Poisson, kind=st.just("poisson"), rate=finite),
    st.builds(Rounds, kind=st.just("rounds"), size=integers),
)
samples = st.builds(
    Sample,
    run=st.builds(
        Run,
        name=text,
        seed=integers,
        out=st.none() | st.just(Path("out")),
        tags=st.lists(text).map(tuple),
        weights=st.dictionaries(text, finite),
        port=integers | st.just("any"),
        quick=st.booleans(),
    ),
    strategy=st.one_of(
        st.builds(FedAsync, name=st.just("fedasync"), alpha=st.floats(0, 1, exclude_min=True)),
        st.builds(FedBuff, name=st.just("fedbuff"), k=st.integers(1, 2**63 - 1)),
    ),
    policies=st.lists(policies).map(tuple),
    policy=st.none() | policies,
    retry=st.just(Retry()),
)


@given(samples)
def test_dump_round_trips_through_load(
    tmp_path_factory: pytest.TempPathFactory, sample: Sample
) -> None:
    path = tmp_path_factory.getbasetemp() / "dumped.toml"
    path.write_bytes(dump(sample).encode())
    assert load(Sample, path=path, environ={}) == sample
