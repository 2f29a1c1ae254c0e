"""Every command in README and docs is typed, and every file written, as a reader would."""

from __future__ import annotations

import asyncio
import csv
import json
import re
import shutil
import subprocess
import tomllib
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from fedstream.broker.client import RedisSettings
from fedstream.coordinator.gateway.attestation import Newcomer, NotAttested
from fedstream.coordinator.gateway.settings import GatewaySettings
from fedstream.device.process import attestation_in
from fedstream.journal import opened
from fedstream.journal.inspection import model_at
from fedstream.local.supervisor import HeldPort
from fedstream.protocol.messages import EvaluationOffer, MetricsReport, Offer
from fedstream.settings.config import read
from fedstream.settings.recording import TRUST
from tests.broker.servers import redis_7
from tests.docs.pages import ROOT, blocks
from tests.docs.reader import Reader
from tests.integration.command import TEST_GUARD_S, adds_up, wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]

needs_flower = pytest.mark.skipif(
    find_spec("flwr") is None, reason="Flower has an environment of its own: make flower"
)
needs_redis_7 = pytest.mark.skipif(redis_7() is None, reason="no Redis of version 7 or later")
Open = Callable[..., Reader]
SLOW = {  # devices leave time to what a reader types while the run goes on
    "--versions 100000": "--versions 100000 --set devices.latency.kind=fixed"
    " --set devices.latency.mean_s=0.3"
}


def newest(page: Reader) -> Path:
    """Makes runs/NAME-TIME the newest run, as a reader puts its name there."""
    runs = page.folder / "runs"
    link = runs / "NAME-TIME"
    link.unlink(missing_ok=True)
    found = max(runs.iterdir(), key=lambda run: run.stat().st_ctime_ns)
    link.symlink_to(found.name)
    return found


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def test_readme(reader: Open) -> None:
    with reader("README.md", instead={"--versions 40": "--versions 4"}) as page:
        page.follow()
        demo = newest(page)
        assert summary(demo)["versions"] == 400
        page.save("my_task.py")
        page.follow(until="fedstream run --strategy")
        own = summary(newest(page))
        assert own["accuracy"] > 0.9
        assert adds_up(own)
        page.follow(until="fedstream run --trainers 4")
        page.wait(page.begin(), r"version [1-9]\d* of 120|result")
        newest(page)
        page.follow(until="fedstream list")
        for one in [*page.shell.beside]:  # top ends with the run
            assert page.shell.ended(one) == 0, one.log.read_text()
        (page.folder / "runs" / "NAME-TIME").unlink()
        (page.folder / "runs" / "NAME-TIME").symlink_to(demo.name)
        page.follow()
        [replayed, _] = (said for one, said in page.said.items() if "fedstream replay" in one)
        assert "400 of 400 versions identical" in replayed


def flipped(run: Path) -> None:
    """Flips a bit in the middle of a run's journal."""
    file = min((run / "journal").glob("*.journal"))
    text = bytearray(file.read_bytes())
    text[len(text) // 2] ^= 1
    file.write_bytes(text)


def simulated(page: Reader) -> tuple[dict[str, Any], dict[str, Any]]:
    """The newest run's results, and its configuration."""
    run = newest(page)
    assert summary(run)["state"] == "finished"
    return summary(run), tomllib.loads((run / "run.toml").read_text())


def test_own_task(reader: Open) -> None:
    ran_in_readme = {"fedstream run --task my_task.py:task --versions 100": "fedstream --version"}
    with reader("docs/tutorial/own-task.md", instead=ran_in_readme) as page:
        page.save("my_task.py")
        page.follow()
        page.save("sized.py")
        page.follow()
        found, settings = simulated(page)
        assert found["parameters"] == 30 * 64 + 64 + 64 * 2 + 2
        assert settings["task"]["args"] == {"hidden": 64, "activation": "tanh"}
        page.save("personal.py")
        page.follow()
        found, _ = simulated(page)
        assert found["metrics"]["device_mean_accuracy"] > 0.9


def test_from_a_script(reader: Open) -> None:
    with reader("docs/tutorial/from-a-script.md") as page:
        page.save("train.py")
        page.follow()
        plain = float(page.said["python train.py"].split()[-1])
        page.save("digits.py")
        page.follow()
        found, settings = simulated(page)
        assert settings["solver"]["kind"] == "adamw"
        assert min(plain, found["accuracy"]) > 0.9
        page.given("fedstream init my_project")
        start = "cd my_project && fedstream simulate --config fedstream.toml --versions 20"
        page.given(f"{start} --set evaluator.per_device=last")


def test_examples(reader: Open) -> None:
    """They can be typed; tests/examples has what they learn."""
    with reader("docs/examples.md", instead={"--versions 100": "--versions 1"}) as page:
        page.follow()


def test_own_solver(reader: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    with reader("docs/tutorial/own-solver.md") as page:
        program = page.save("my_solvers.py")
        page.follow()
        found, settings = simulated(page)
        assert settings["solver"]["kind"] == f"{program}:Adam"
        assert found["versions"] == 50
        monkeypatch.chdir(page.folder)
        group = read(page.save("group.toml", "toml"))
        assert group.solvers[0].of(group.solver).model_dump()["beta_1"] == 0.8


def test_own_partition(reader: Open) -> None:
    with reader("docs/tutorial/own-partition.md") as page:
        page.save("my_partitions.py")
        page.follow()
        found, settings = simulated(page)
        assert settings["task"]["partition"]["most"] == 20.0
        assert found["accuracy"] > 0.8


def test_own_policy(reader: Open) -> None:
    with reader("docs/tutorial/own-policy.md") as page:
        page.save("my_policies.py")
        page.follow()
        found, settings = simulated(page)
        assert settings["scheduler"]["policy"]["staleness"] == 1.5
        assert 0.5 < found["mean_staleness"] < 4.0


POISONED, SINCE, VERSIONS = 3, 100, 300  # docs/replay.md: a device, its first poison, the run


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory, quick_programs: Path) -> Path:
    """The run of docs/replay.md, as short as a bisection can do with; its task lies beside it."""
    folder = tmp_path_factory.mktemp("poisoned")
    [program] = (one.text for one in blocks("docs/replay.md") if "class Poisoned" in one.text)
    (folder / "poisoned.py").write_text(program)
    keys = ("scheduler.steps.n=15", "updater.norm_factor=0")
    sets = [word for key in keys for word in ("--set", key)]
    asked = ("--task", "poisoned.py:task", "--versions", "150", *sets, "--out", "run")
    subprocess.run([quick_programs / "fedstream", "simulate", *asked], cwd=folder, check=True)
    return folder / "run"


def test_replay(reader: Open, any_redis: RedisSettings) -> None:
    with reader("docs/replay.md", instead={"URL": any_redis.url}) as page:
        page.save("poisoned.py")
        page.follow(until="fedstream journal verify copy")
        run = page.folder / "runs" / "poisoned"
        every_version_comes_out_again(page)
        bisect_names_the_version_and_the_device(page, run)
        without_the_device_the_model_stays_good(page)
        flipped(shutil.copytree(run, page.folder / "copy"))
        damaged = {"fedstream journal verify copy": 1, "fedstream replay copy": 1}
        page.follow(fails=damaged)
        versions = re.findall(r"^version (\d+): device \d", page.python(), re.MULTILINE)
        assert versions == ["126", "127", "128", "129", "130"]
        page.follow()
        assert f"identical, versions 0 to {VERSIONS}" in page.given(
            "fedstream journal diff runs/poisoned again"
        )
        page.stop()
        page.given(f"fedstream purge --redis {any_redis.url} --run again --force --yes")


def every_version_comes_out_again(page: Reader) -> None:
    found = json.loads(page.given("fedstream replay runs/poisoned --json"))
    assert found["made"] == found["identical"] == found["version"] == VERSIONS
    assert found["error"] is None


def bisect_names_the_version_and_the_device(page: Reader, run: Path) -> None:
    bisect = f"fedstream journal bisect runs/poisoned --below 0.5 {TRUST} --json"
    found = json.loads(page.given(bisect))
    assert found["found"]
    assert SINCE < found["version"] <= VERSIONS
    assert found["after"] < 0.5 <= found["before"]
    [cause] = found["causes"]
    assert cause["device"] == POISONED
    assert SINCE <= cause["tau"] < found["version"]
    assert cause["norm"] > 10  # the honest devices' are near 2
    with (run / "metrics.csv").open() as table:
        assert list(csv.DictReader(table))[found["version"]]["device"] == str(POISONED)


def without_the_device_the_model_stays_good(page: Reader) -> None:
    without = f"--without device={POISONED} --evaluate-every 1 {TRUST}"
    found = json.loads(page.given(f"fedstream replay runs/poisoned {without} --json"))
    assert found["identical"] == VERSIONS
    points = [point for point in found["points"] if point["version"] > SINCE]
    assert len(points) == VERSIONS - SINCE
    original = [point["original"]["accuracy"] for point in points]
    changed = [point["changed"]["accuracy"] for point in points]
    assert min(original) < 0.3
    assert min(changed) > 0.7
    assert fmean(changed) > fmean(original) + 0.2
    assert [Path(file).name for file in found["files"]] == ["replay.csv", "replay.png"]


def test_simulation(reader: Open, mnist: Path) -> None:
    with reader("docs/simulation.md", instead={"--versions 100": "--versions 20"}) as page:
        (page.folder / "DATA_ROOT").symlink_to(mnist)
        page.follow()
        page.python()


def test_strategies(reader: Open) -> None:
    # The assertions hold for runs and simulations, and a simulation takes a quarter of the time.
    simulated = {
        "fedstream run": "fedstream simulate --versions 5",
        "--trainers 8": "",
    }
    with reader("docs/strategies.md", instead=simulated) as page:
        page.follow()
        for table in ("participation", "solvers"):
            found = read(page.save("run.toml", "toml"), [])
            assert len(getattr(found, table)) == 2
            page.follow()


def test_algorithms(reader: Open, mnist: Path) -> None:
    shorter = {"fedstream simulate": "fedstream simulate --versions 5"}
    with reader("docs/algorithms.md", instead=shorter) as page:
        (page.folder / "DATA_ROOT").symlink_to(mnist)
        page.follow()


def test_own_strategy(reader: Open) -> None:
    with reader(
        "docs/tutorial/own-strategy.md", instead={"--versions 100": "--versions 20"}
    ) as page:
        page.save("my_staleness.py")
        page.follow()
        page.save("my_rules.py")
        page.follow()
        summary = page.folder / "runs/by-samples/summary.json"
        assert json.loads(summary.read_text())["versions"] == 20
        page.save("test_my_rules.py")
        page.given("python -m pytest -q -p no:cacheprovider test_my_rules.py")
        assert "fedstream.strategies" in page.text("toml")
        page.follow()


def test_strategy_classes(reader: Open) -> None:
    with reader("docs/reference/strategy-classes.md") as page:
        page.save("my_rules.py")
        page.follow()
        found, settings = simulated(page)
        assert settings["strategy"]["voters"] == 5
        assert (found["versions"], found["accuracy"] > 0.8) == (60, True), found
        models = page.save("models.py")
        shown = re.findall(r"^print\(.*  # (.*)$", models.read_text(), re.MULTILINE)
        assert page.given("python models.py").splitlines() == shown
        page.python()  # check_strategy


def test_wire_formats(reader: Open) -> None:
    with reader("docs/how-to/wire-formats.md") as page:
        page.follow()
        found = summary(page.folder / "runs/int8")
        assert (found["versions"], found["accuracy"] > 0.6) == (60, True), found
        assert adds_up(found)
        assert found["encoded"]["updates"] >= 60
        assert found["encoded"]["smaller_by"] > 3.8
        assert "60 of 60 versions identical" in page.said["fedstream replay runs/int8"]


@needs_flower
def test_flower(reader: Open) -> None:
    with reader("docs/how-to/flower.md") as page:
        page.follow(until="fedstream run --flower examples/flower --versions 6 ")
        alone = summary(newest(page))
        page.follow()
        buffered = summary(newest(page))
        assert (alone["strategy"], buffered["strategy"]) == ("fedasync", "fedbuff")
        assert (alone["versions"], buffered["versions"]) == (60, 6)
        assert min(alone["accuracy"], buffered["accuracy"]) > 0.8
        page.save("my_task.py")
        page.follow()
        own = summary(newest(page))
        assert own["accuracy"] > 0.8
        assert adds_up(alone)
        assert adds_up(buffered)


def test_in_a_script(reader: Open) -> None:
    with reader("docs/tutorial/in-a-script.md") as page:
        page.save("compare.py")
        page.follow()
        found = re.findall(
            r"^([\w-]+) +accuracy (0\.\d+) after 60 updates$",
            page.said["python compare.py"],
            re.MULTILINE,
        )
        assert [strategy for strategy, _ in found] == ["fedasync", "fedbuff", "fedavg"]
        assert all(float(accuracy) > 0.3 for _, accuracy in found)
        quickly(page, page.save("live.py"))
        page.follow()
        assert "version 40 reached" in page.said["python live.py"]
        cells = page.folder / "cells.py"
        cells.write_text("\n".join(page.text("python") for _ in range(2)))
        quickly(page, cells)
        page.given("python cells.py")
        assert summary(newest(page))["versions"] == 20


def quickly(page: Reader, script: Path) -> None:
    """Lets a script start fedstream's processes with the reader's own Python."""
    python = str(page.folder / ".venv" / "bin" / "python")
    script.write_text(f"import sys\n\nsys.executable = {python!r}\n{script.read_text()}")


def test_track(reader: Open) -> None:
    with reader("docs/how-to/track.md", instead={"--versions 60": "--versions 20"}) as page:
        page.follow()
        [events] = (page.folder / "runs/tracked/tensorboard").iterdir()
        assert (events / "model.safetensors").is_file()
        assert [*(page.folder / "mlruns").glob("*/*/artifacts/model.safetensors")]
        config = page.save("run.toml", "toml")
        assert [one.kind for one in read(config).sinks] == ["mlflow", "wandb"]
        page.follow()
        assert [*(page.folder / "runs/later/tensorboard").glob("*/model.safetensors")]
        page.save("lines.py")
        page.follow()
        [lines] = (page.folder / "lines").iterdir()
        points = [json.loads(line) for line in lines.read_text().splitlines()]
        made = [point["version"] for point in points if point["kind"] == "version"]
        assert made == [*range(31)]


def test_trace(reader: Open) -> None:
    with reader("docs/how-to/trace.md") as page:
        assert read(page.save("run.toml", "toml")).tracing.ratio == 0.1


def test_compare(reader: Open) -> None:
    with reader("docs/how-to/compare.md") as page:
        page.follow()
        assert "updates to 0." in page.said[next(c for c in page.said if "compare" in c)]
        assert (page.folder / "runs/comparison/comparison.png").exists()
        assert (page.folder / "runs/fedasync/report-1/metrics.csv").exists()
        said = page.python()
        assert "updates_to_target" in said
        assert "devices    accuracy mean" in said
        page.follow()
        assert "worst tenth" in page.said[next(c for c in page.said if "fedstream run" in c)]


def test_browser(reader: Open, poisoned: Path) -> None:
    [command] = re.findall(r"fedstream run .* --out", (ROOT / "docs/how-to/browser.md").read_text())
    with reader("docs/how-to/browser.md", instead={command: f"cp -r {poisoned}"}) as page:
        (page.folder / "poisoned.py").symlink_to(poisoned.with_name("poisoned.py"))
        page.follow("fedstream ui")
        paths = ("", "versions/12?to=10&models=1", "updates", "devices", "devices/3")
        for more in (paths, ("bisect",), ("beside",)):
            served = page.begin()
            page.wait(served, r"http://\S+/ ")
            [link] = re.findall(r"http://\S+/", served.log.read_text())
            for path in more:
                assert "<h1>" in fetched(link + path)
            if more == ("bisect",):
                the_page_names_the_device(link)
            page.follow("" if more == ("beside",) else "fedstream ui")
        assert (page.folder / "runs/demo/journal.index").is_file()
        assert "Version 12" in (page.folder / "runs/demo/report/report.html").read_text()
        page.stop()


def fetched(link: str, fields: Mapping[str, str] | None = None) -> str:
    """A page; with fields, what a form is answered."""
    data = None if fields is None else urlencode(fields).encode()
    with urllib.request.urlopen(link, data, timeout=60) as answer:  # noqa: S310
        return str(answer.read().decode())


def the_page_names_the_device(link: str) -> None:
    token = re.search(r'name="token" value="(.+?)"', fetched(f"{link}bisect"))
    assert token
    asked = {"metric": "accuracy", "side": "below", "bound": "0.5"}
    fetched(f"{link}bisect", asked | {"token": token[1], "do": "begin"})
    address = f"{link}bisect?{urlencode(asked)}"
    wait_until(lambda: "data-going" not in fetched(address), "an answer")
    assert f'<a href="/what-if?without={POISONED}">' in fetched(address)


def test_sweep(reader: Open) -> None:
    # More processes would each load torch; tests/experiments has them.
    shorter = {"--versions 60": "--versions 20", "--repeats": "--jobs 1 --repeats"}
    with reader("docs/how-to/sweep.md", instead=shorter) as page:
        page.follow(until="fedstream run")
        [rules] = (said for one, said in page.said.items() if "sweeps/rules" in one)
        assert "strategy = {'name': 'fedbuff', 'buffer_size': 5}" in rules
        best = tomllib.loads((page.folder / "sweeps" / "demo" / "best.toml").read_text())
        page.follow()
        assert summary(newest(page))["strategy"] == best["strategy"]["name"]


def test_chaos(reader: Open) -> None:
    with reader("docs/chaos.md") as page:
        page.follow()


RUN = """
[run]
versions = 20
[redis]
url = "{url}"
[journal]
dir = "{folder}/made"
"""
SECRET = "a-password-or-token"  # noqa: S105
ROLES = ("coordinator", "scheduler", "updater", "evaluator", "trainer", "gateway", "operator")


def test_extending_and_forking(reader: Open) -> None:
    """The first run is simulated, which is faster; what goes on from it is real."""
    first = "fedstream run --versions 20 --out runs/first"
    with reader(
        "docs/how-to/continue.md", instead={first: first.replace("run ", "simulate ", 1)}
    ) as page:
        page.follow()
        made = summary(page.folder / "runs" / "first")
        assert (made["state"], made["versions"], made["versions_before"]) == ("finished", 30, 20)
        assert adds_up(made)
        assert made["tasks"]["applied"] == 30
        replayed = json.loads(page.given("fedstream replay runs/first --json"))
        assert (replayed["made"], replayed["identical"]) == (30, 30)
        fork = summary(page.folder / "runs" / "fork")
        assert fork["start"].startswith("demo@15 ")
        with opened(page.folder / "runs" / "first") as chain:
            assert fork["start"].endswith(model_at(chain, 15)[1])


def test_own_services(reader: Open, any_redis: RedisSettings) -> None:
    with reader("docs/how-to/run.md") as page:
        config = RUN.format(url=any_redis.url, folder=page.folder)
        (page.folder / "run.toml").write_text(config)
        page.follow()
        page.ready()
        state = ""
        while state != "finished":
            state = json.loads(page.given("fedstream status --config run.toml --json"))["state"]
        page.stop()
        page.given("fedstream purge --config run.toml --force --yes")


@needs_redis_7
def test_redis(reader: Open) -> None:
    with HeldPort() as port:
        serve = f"redis-server --port {port.number} --aclfile users.acl"
        with reader(
            "docs/how-to/redis.md", instead={"redis-server --aclfile users.acl": serve}
        ) as page:
            config = RUN.format(url=f"redis://127.0.0.1:{port.number}", folder=page.folder)
            (page.folder / "run.toml").write_text(config)
            page.follow(until="export FEDSTREAM_PASSWORD_SITE")
            page.ready()
            page.stop()
            sites = '[coordinator]\nsites = ["pool", "hospital-a:0-9"]\n'
            (page.folder / "run.toml").write_text(config + sites)
            page.follow(until="FEDSTREAM_REDIS__USERNAME=trainer-hospital-a")
            page.shell.begin(serve)  # anew
            page.follow()
            page.ready()
            page.stop()


@contextmanager
def deployed(reader: Open, page: str, **instead: str) -> Iterator[Reader]:
    """A page about a deployment elsewhere, beside one: Redis with users, a coordinator, an updater.

    Port-forwards lead to it.
    """
    with HeldPort() as redis, HeldPort() as http:
        url, routes = f"redis://127.0.0.1:{redis.number}", f"http://127.0.0.1:{http.number}"
        environ = {f"FEDSTREAM_PASSWORD_{role.upper()}": SECRET for role in ROLES}
        environ |= {"CLUSTER_PASSWORD": SECRET, "FEDSTREAM_REDIS__PASSWORD": SECRET}
        forwarded = {"redis://127.0.0.1:6379": url, "http://127.0.0.1:8080": routes}
        text = (ROOT / page).read_text()
        stands = {one: here for one, here in forwarded.items() if one in text} | instead
        with reader(page, environ, stands) as opened:
            config = RUN.format(url=url, folder=opened.folder) + f"[http]\nport = {http.number}\n"
            config += '[coordinator]\nsites = ["pool", "gateway"]\n'
            (opened.folder / "run.toml").write_text(config)
            opened.given("fedstream acl --config run.toml --out users.acl")
            opened.shell.begin(f"redis-server --port {redis.number} --aclfile users.acl")
            for role in ("coordinator", "updater"):
                user = f"FEDSTREAM_REDIS__USERNAME={role}"
                opened.shell.begin(f"{user} fedstream {role} --config run.toml")
            opened.ready()
            yield opened
            opened.stop()


@needs_redis_7
def test_inspect(reader: Open) -> None:
    with deployed(reader, "docs/how-to/inspect.md", **{"--run RUN": "--run demo"}) as page:
        page.follow()


def test_quarantine(reader: Open) -> None:
    with reader("docs/how-to/quarantine.md", instead=SLOW) as page:
        run = page.begin()
        page.wait(run, r"version [1-9]\d* of")
        page.follow()
        said = {command.split()[2]: text for command, text in page.said.items()}
        assert "in quarantine: device 3\n" in said["quarantine"]
        assert "released from quarantine: device 3\n" in said["release"]
        [(_, code)] = page.shell.interrupt()
        assert code == 130
        shown = page.given("fedstream journal show runs/live --device 3")
        assert [row.split()[3] for row in shown.splitlines() if "quarantine " in row] == [
            "quarantine"
        ]


def test_evaluate_on_devices(reader: Open) -> None:
    with reader("docs/how-to/evaluate-on-devices.md", instead={"400": "40"}) as page:
        page.follow()
        found = summary(newest(page))
        assert found["best"]["devices_loss"]["value"] < 0.5
        simulated = page.said[next(iter(page.said))]
        assert re.search(r"devices_recall +[01]\.", simulated)
        assert "devices         loss mean" in simulated


def test_gateway(reader: Open) -> None:
    with reader("docs/how-to/gateway.md", instead=SLOW) as page:
        settings = read(page.save("gateway.toml", "toml"))
        assert settings.gateway.site in settings.coordinator.sites
        assert settings.gateway.tls_cert
        run = page.begin()
        page.wait(run, r"version [1-9]\d* of")
        page.follow()
        said = {command.split()[2]: text for command, text in page.said.items()}
        invited = re.findall(r"^device (\d): \1-[\w-]{32}$", said["invite"], re.MULTILINE)
        listed = re.findall(r"^ *(\d)  invited ", said["enrolled"], re.MULTILINE)
        assert invited == listed == ["3", "4"]
        assert "revoked: device 3\n" in said["revoke"]
        assert "admitted: device 3\n" in said["admit"]
        page.shell.interrupt()
        asking = read(page.save("asking.toml", "toml")).gateway
        assert (asking.client_ca, asking.tls_cert) == ("devices-ca.pem", "fullchain.pem")


def test_gateway_protocol(reader: Open) -> None:
    with reader("docs/reference/gateway-protocol.md") as page:
        offer = Offer.decode(page.text("json"))
        assert offer.update.url == f"/v1/tasks/{offer.task.id}/updates/{offer.attempt}"
        assert offer.model.url == f"/v1/models/{offer.model.digest}"
        asked = EvaluationOffer.decode(page.text("json"))
        path = f"/v1/tasks/{asked.task.id}/measurements/{asked.attempt}"
        assert asked.measurement.url == path
        assert MetricsReport.decode(page.text("json")).sums["accuracy"] == (52, 60)


def test_privacy(reader: Open) -> None:
    """A run with a helper of its own; then parties apart: their mean within its noise, once."""
    with HeldPort() as port, reader("docs/privacy.md") as page:
        page.follow("fedstream helper")
        out = newest(page)
        assert summary(out)["versions"] == 30
        shown = " ".join((ROOT / "docs" / "privacy.md").read_text().split())
        assert summary(out)["privacy"]["statement"] in shown
        [agreed] = [said for command, said in page.said.items() if "fedstream agree" in command]
        [owner] = re.findall(r"owner +([0-9a-f]{64})", agreed)
        file = page.folder / "private" / "helper.toml"
        assert owner in file.read_text()
        file.write_text(file.read_text().replace("8444", str(port.number)))
        page.begin()
        page.ready()
        file = page.save("private.toml", "toml")
        text = file.read_text().replace("OWNER", owner).replace("8444", str(port.number))
        file.write_text(text)
        page.follow()
        assert summary(newest(page))["privacy"]["sigma"] == 1.0
        asked = page.text("python").replace("8444", str(port.number))
        (page.folder / "ask.py").write_text(asked)
        mean = float(page.given("python ask.py").split()[-1])
        assert mean == pytest.approx(0.0045, abs=0.007)
        code, said = page.shell.run("python ask.py")
        assert code == 1
        assert "HTTP Error 409" in said
        page.follow()
        [said] = [said for command, said in page.said.items() if "private.over=mean" in command]
        assert "the original: 10 of 10 versions identical" in said
        page.stop()
        page.follow()
        [stated] = [said for command, said in page.said.items() if "fedstream privacy" in command]
        row = re.search(r"^epsilon .*$", stated, re.MULTILINE)
        assert row
        assert " ".join(row[0].split()) in shown


def test_attest_devices(reader: Open) -> None:
    with reader("docs/how-to/attest-devices.md") as page:
        page.save("my_attestation.py")
        table = tomllib.loads(page.text("toml"))["gateway"]["attestation"]
        page.save("vouch.py")
        page.follow()
        program, _, name = table["kind"].partition(":")
        named = {"kind": f"{page.folder / program}:{name}", "key": str(page.folder / table["key"])}
        verifier = GatewaySettings.model_validate({"attestation": named}).attestation
        newcomer = Newcomer(3, "demo", (page.folder / "device.pub").read_text())
        shown = attestation_in(f"manufacturer:{page.folder / 'device.attestation'}")
        asyncio.run(verifier.verify(shown, newcomer))
        other = Newcomer(3, "demo", (page.folder / "manufacturer.pem").read_text())
        with pytest.raises(NotAttested):
            asyncio.run(verifier.verify(shown, other))


def test_devices_over_http(reader: Open) -> None:
    with reader("docs/how-to/devices-over-http.md", instead=SLOW) as page:
        page.follow()
        out = newest(page)
        assert summary(out)["versions"] == 60
        assert adds_up(summary(out))
        said = "".join((out / "logs" / f"device-{n}.log").read_text() for n in range(3))
        assert said.count(": admitted: ") >= 57, "all but what was on its way at the end"
        page.save("my_task.py")
        run = page.begin()
        page.wait(run, r"version [1-9]")
        [url] = re.findall(r"gateway +(https://\S+)", run.log.read_text())
        page.follow("python examples/plain_device.py")
        [invited] = [text for command, text in page.said.items() if "devices invite 7" in command]
        [invite] = re.findall(r"device 7: (\S+)", invited)
        plain = page.begin(
            {"examples/": f"{ROOT}/examples/", "https://127.0.0.1:PORT": url, "INVITE": invite}
        )
        page.wait(plain, "'state': 'admitted'")
        page.shell.ended(plain, "TERM")
        assert page.shell.ended(run, "INT") == 130


@needs_redis_7
def test_production(reader: Open) -> None:
    with deployed(reader, "docs/how-to/production.md") as page:
        page.follow()
        page.save("../my-run/kustomization.yaml", "yaml")
        page.save("../my-run/backup.yaml", "yaml")
        page.given("openssl verify -CAfile ca.crt tls.crt")
        page.given("cp ../fedstream/run.toml .")  # what a pod here reads
        page.follow()


@needs_redis_7
def test_kubernetes(reader: Open) -> None:
    with deployed(reader, "docs/how-to/kubernetes.md") as page:
        page.follow()
        assert len([*yaml.safe_load_all(page.text("yaml"))]) == 2
        page.follow()
        page.given("openssl verify -CAfile helper-ca.crt helper.crt; cd ..")
        change_production(page)
        page.follow()
        change_production(page)


def test_compose(reader: Open) -> None:
    with reader("docs/how-to/compose.md") as page:
        page.follow()
        page.given(
            "[ ${#FEDSTREAM_POLICY_OWNER} = 64 ] && ls private/roster.txt private/keys/19.pem"
        )


def change_production(page: Reader) -> None:
    """With the next block, which is a part of an overlay."""
    (page.folder / "CHANGED").mkdir(exist_ok=True)
    part = page.text("yaml").replace("../fedstream/k8s", "../k8s")
    lines = ["resources: [../k8s/overlays/production-aof]", part]
    (page.folder / "CHANGED" / "kustomization.yaml").write_text("\n".join(lines))
    page.given("kubectl apply -k CHANGED")


def test_alerts(reader: Open) -> None:
    with reader("docs/how-to/alerts.md") as page:
        change_production(page)


def test_operate_kubernetes(reader: Open, poisoned: Path) -> None:
    environ = {"CLUSTER_JOURNAL": "made/journal"}
    with reader("docs/how-to/operate-kubernetes.md", environ) as page:
        (page.folder / "task.py").symlink_to(poisoned.with_name("poisoned.py"))
        (page.folder / "made").symlink_to(poisoned)
        for file in ("tls.crt", "tls.key", "ca.crt"):
            (page.folder / file).touch()
        for overlay in ("YOUR_OVERLAY", "FEDAVG"):
            (page.folder / overlay).mkdir()
            lines = ["resources: [../k8s/overlays/production-aof]", page.text("yaml")]
            (page.folder / overlay / "kustomization.yaml").write_text("\n".join(lines))
            page.given(f"kubectl apply -k {overlay}")
        page.follow()
        [found] = (said for one, said in page.said.items() if "bisect" in one)
        assert "device 3" in found
