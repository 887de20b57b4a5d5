"""Check the files of deploy/: they name files that exist, and flags that the server has. The chart is rendered here."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from ridgeline.cli.main import app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/ridgeline"
KUBERAY_KEYS = {"image", "common", "head", "worker", "additionalWorkerGroups"}
SERVE = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]


def flags(words: list[str]) -> dict[str, Any]:
    """Return the parameters that a `ridgeline serve` command line has. Raises click's errors for unknown ones."""
    assert words[0] == "serve"
    return SERVE.make_context("serve", list(words[1:])).params  # type: ignore[no-any-return]


def render(template: str, values: dict[str, Any], release: dict[str, str]) -> str:
    """Return what helm writes for a template with `if` and `range` on lines of their own, and `quote`.

    The rules are those of Go's text/template and of Helm's `quote`. Anything else raises ValueError.
    """

    def value(expression: str, item: Any) -> Any:
        name, *pipe = [part.strip() for part in expression.split("|")]
        found: Any = {"Values": values, "Release": release}
        if name == ".":
            found = item
        else:
            for key in name.lstrip(".").split("."):
                found = found[key]
        if pipe not in ([], ["quote"]):
            raise ValueError(f"{expression!r} is not rendered here")
        return f'"{found}"' if pipe else found

    def block(lines: Iterator[str], item: Any, shown: bool) -> Iterator[str]:
        for line in lines:
            action = re.fullmatch(r"\s*\{\{- (if|range|end) ?(.*?) ?\}\}", line)
            if action is None:
                if shown:
                    yield re.sub(r"\{\{ (.*?) \}\}", lambda found: str(value(found[1], item)), line)
            elif action[1] == "end":
                return
            elif action[1] == "if":
                yield from block(lines, item, shown and bool(value(action[2], item)))
            else:
                inner = list(until_end(lines))
                for one in value(action[2], item):
                    yield from block(iter(inner), one, shown)

    def until_end(lines: Iterator[str]) -> Iterator[str]:
        depth = 1
        for line in lines:
            depth += bool(re.match(r"\s*\{\{- (if|range)", line)) - bool(re.match(r"\s*\{\{- end", line))
            if not depth:
                return
            yield line

    return "\n".join(block(iter(template.splitlines()), None, True))


def chart(**changes: Any) -> list[dict[str, Any]]:
    values = yaml.safe_load((CHART / "values.yaml").read_text()) | changes
    found = []
    for template in sorted((CHART / "templates").glob("*.yaml")):
        text = render(template.read_text(), values, {"Name": "llm", "Namespace": "team"})
        assert "{{" not in text
        found += list(yaml.safe_load_all(text))
    return found


def test_the_chart_starts_a_server() -> None:
    service, server = chart()
    assert service["kind"] == "Service"
    assert server["kind"] == "StatefulSet"
    pod = server["spec"]["template"]
    assert service["spec"]["selector"] == server["spec"]["selector"]["matchLabels"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    found = flags(container["args"])
    assert found["model_argument"] == "pocket"
    assert found["allowed_hosts"] == ("llm", "llm.team", "llm.team.svc.cluster.local")
    assert "env" not in container
    (claim,) = server["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == container["volumeMounts"][0]["name"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports[service["spec"]["ports"][0]["targetPort"]] == 8000
    for name, path in (("startupProbe", "/ready"), ("readinessProbe", "/ready"), ("livenessProbe", "/health")):
        assert container[name]["httpGet"] == {"path": path, "port": "http"}


def test_the_chart_takes_flags_and_keys() -> None:
    _, server = chart(args=["--weights", "int8", "--port", "8000"], keysSecret="keys", model="a/b", replicas=2)
    (container,) = server["spec"]["template"]["spec"]["containers"]
    found = flags(container["args"])
    assert (found["model_argument"], found["weights"]) == ("a/b", "int8")
    (key,) = container["env"]
    assert (key["name"], key["valueFrom"]["secretKeyRef"]) == ("RIDGELINE_API_KEY", {"name": "keys", "key": "keys"})
    assert server["spec"]["replicas"] == 2


def test_compose_names_files_and_flags_that_exist() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    found = flags([word.replace("${MODEL:-pocket}", "pocket") for word in services["ridgeline"]["command"]])
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert host in services
    assert (host,) == found["allowed_hosts"]
    assert int(port) == found["port"]
    build = services["ridgeline"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    mounts = [mount.split(":") for service in services.values() for mount in service.get("volumes", [])]
    for source, *_ in mounts:
        assert source in compose["volumes"] or (DEPLOY / source).is_file(), source
    inside = {source: target for source, target, *_ in mounts}
    (provider,) = yaml.safe_load((DEPLOY / "grafana/dashboards.yaml").read_text())["providers"]
    assert Path(inside["../docs/grafana.json"]).parent == Path(provider["options"]["path"])
    (source,) = yaml.safe_load((DEPLOY / "grafana/datasources.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_an_image_starts_a_server_on_its_port(name: str) -> None:
    text = (DEPLOY / name).read_text()
    (command,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    found = flags(yaml.safe_load(command))
    assert found["host"] == "0.0.0.0"
    assert f"EXPOSE {found['port']}\n" in text
    assert 'ENTRYPOINT ["ridgeline"]' in text
    assert "USER ridgeline" in text


def test_a_flag_that_does_not_exist_is_found() -> None:
    with pytest.raises(Exception, match="No such option: --nosuch"):
        flags(["serve", "pocket", "--nosuch"])


def test_the_service_of_systemd(tmp_path: Path) -> None:
    text = (DEPLOY / "ridgeline.service").read_text()
    (start,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, *words = shlex.split(start)
    assert program.endswith("/bin/ridgeline")
    config = tmp_path / "serve.yaml"
    config.write_text("model: pocket\nport: 8080\n")
    assert flags([str(config) if word.startswith("/etc/") else word for word in words])["port"] == 8080
    stop = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert stop is not None
    assert int(stop[1]) > flags(["serve"])["shutdown_timeout"]
    if shutil.which("systemd-analyze"):
        unit = tmp_path / "ridgeline.service"
        unit.write_text(text.replace(program, shutil.which("true") or ""))
        run = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
        assert (run.returncode, run.stdout + run.stderr) == (0, "")


def test_the_application_of_ray_serve() -> None:
    """The file names a function that exists, and a line that the command takes."""
    (given,) = yaml.safe_load((DEPLOY / "ray/serve.yaml").read_text())["applications"]
    module, name = given["import_path"].split(":")
    assert callable(getattr(importlib.import_module(module), name)) and given["args"].keys() == {"serve"}
    assert flags(["serve", *shlex.split(given["args"]["serve"])])["replicas"] == 2
    values = yaml.safe_load((DEPLOY / "ray/kuberay-values.yaml").read_text())
    assert values.keys() <= KUBERAY_KEYS
    named = {one["name"]: one for one in values["common"]["containerEnv"]}
    assert named["RAY_AUTH_MODE"]["value"] == "token" and "valueFrom" in named["RAY_AUTH_TOKEN"]
    mounted = {one["name"] for one in values["worker"]["volumeMounts"]}
    assert mounted == {one["name"] for one in values["worker"]["volumes"]}


@pytest.mark.parametrize(
    ("extras", "more"), (("", []), ("[torch]", []), ("[ray]", ["wget"]), ("[torch,ray]", ["wget"]))
)
def test_an_image_with_ray_has_the_program_of_kuberays_probes(extras: str, more: list[str]) -> None:
    stage = (DEPLOY / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    assert "ARG EXTRAS=\n" in stage  # arguments do not pass from stage to stage
    (packages,) = re.findall(r"install -y --no-install-recommends (.*?) \\\n  &&", stage, re.DOTALL)
    shown = subprocess.run(
        ["sh", "-c", f"echo {packages}"], env={"EXTRAS": extras}, capture_output=True, text=True, check=True
    )
    assert shown.stdout.split() == ["python3", "ca-certificates", *more]
