"""Every alert and every panel asks for metrics and labels that exist."""

import json
import re
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from deployed import DEPLOY, ROOT, compose

from sglang_cake.core.counters import FAILURE_REASONS
from sglang_cake.stores.http.http_transport import HttpCounters

DASHBOARD = DEPLOY / "grafana/provisioning/dashboards/sglang-cake.json"
DATASOURCES = DEPLOY / "grafana/provisioning/datasources/prometheus.yaml"
# Labels of every target, and those that SGLang gives to each of its metrics.
OF_TARGETS = {"job", "instance", "le", "tp_rank"}


def known_metrics() -> dict[str, set[str]]:
    """Names with their own labels: those of the two generated or checked tables of docs/."""
    row = r"^\| `(sglang:cake_\w+)` \| (\w+) \|([^|]*)\|"
    found = {
        name + suffix: set(re.findall(r"`(\w+)`", labels))
        for name, kind, labels in re.findall(row, (ROOT / "docs/monitoring.md").read_text(), re.M)
        for suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
    }
    page = (ROOT / "docs/http-store.md").read_text().partition("### Metrics")[2]
    for cell in re.findall(r"^\| (`.*?`) \|", page.partition("###")[0], flags=re.M):
        for name, labels in re.findall(r"`(\w+)(?:\{([\w,]+)\})?`", cell):
            found[f"sglang_cake_store_{name}"] = set(labels.split(",")) - {""}
    return found | {"up": set()}


def is_known(name: str) -> bool:
    """Also SGLang's own metrics, by the text of its source."""
    if name in known_metrics():
        return True
    plain = re.sub(r"_(bucket|sum|count|total)$", "", name)
    path = "sglang/srt/observability/metrics_collector.py"
    source = Path(str(distribution("sglang").locate_file(path)))
    return not name.startswith("sglang:cake_") and f'name="{plain}"' in source.read_text()


def walk(node: Any) -> Iterator[Any]:
    yield node
    for name in ("expr", "lhs", "rhs", "param", "vector_selector", "args"):
        below = getattr(node, name, None)
        for each in below if isinstance(below, list) else [below]:
            if each is not None:
                yield from walk(each)


def metrics_of(expression: str) -> set[str]:
    nodes = walk(promql.parse(expression))
    return {node.name for node in nodes if isinstance(node, promql.VectorSelector)}


def labels_of(expression: str) -> set[str]:
    found: set[str] = set()
    for node in walk(promql.parse(expression)):
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            found |= set(node.modifier.labels)
    return found


def selectors_of(expression: str) -> dict[str, list[Any]]:
    """Of each metric of the expression, the conditions on its labels."""
    nodes = (it for it in walk(promql.parse(expression)) if isinstance(it, promql.VectorSelector))
    return {node.name: node.matchers.matchers for node in nodes}


def admits(matchers: list[Any], label: str, value: str) -> bool:
    """Whether series with this value of the label are selected."""
    for each in (it for it in matchers if it.name == label):
        equal = {"Equal": each.value == value, "Re": re.fullmatch(each.value, value)}
        kind = str(each.op).rpartition(".")[2]
        if bool(equal[kind.removeprefix("Not")]) is kind.startswith("Not"):
            return False
    return True


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    return list(group["rules"])


def targets() -> Iterable[dict[str, Any]]:
    return (it for panel in json.loads(DASHBOARD.read_text())["panels"] for it in panel["targets"])


ASKED = {rule["alert"]: (rule["expr"], rule["annotations"]["summary"]) for rule in rules()}
ASKED |= {f"panel-{n}": (it["expr"], it["legendFormat"]) for n, it in enumerate(targets())}


@pytest.mark.parametrize("name", ASKED)
def test_expression_parses_and_has_metrics_and_labels_that_exist(name: str) -> None:
    expression, text = ASKED[name]
    metrics = metrics_of(expression)
    assert metrics
    assert len(metrics) == len(set(re.findall(r"\b(?:sglang:|sglang_cake_)\w+|\bup\b", expression)))
    known = known_metrics()
    assert all(map(is_known, metrics)), metrics
    labels = set().union(*(known.get(metric, set()) for metric in metrics)) | OF_TARGETS
    assert labels_of(expression) <= labels
    assert set(re.findall(r"\{\{ *(?:\$labels\.)?(\w+) *\}\}", text)) <= labels


def test_expression_names_that_do_not_exist_are_found() -> None:
    assert metrics_of("sum by (le) (rate(a[5m])) > on(x) b / c{d='e'}") == {"a", "b", "c"}
    assert not is_known("sglang:cake_loaded_token_total")
    assert not is_known("sglang:time_to_the_first_token_seconds_bucket")
    assert is_known("sglang:time_to_first_token_seconds_bucket")
    assert labels_of("sum by (le, x) (rate(a[5m]))") == {"le", "x"}
    with pytest.raises(ValueError, match="invalid promql query"):
        metrics_of("sum by le (a)")


def test_comparison_of_metrics_has_no_label_on_one_side_alone() -> None:
    """It would match nothing, and the alert would never fire."""
    known = known_metrics()
    for rule in rules():
        for node in walk(promql.parse(rule["expr"])):
            if isinstance(node, promql.BinaryExpr) and metrics_of(str(node.rhs)):
                sides = []
                for side in (str(node.lhs), str(node.rhs)):
                    labels = set().union(*(known[metric] for metric in metrics_of(side)))
                    sides.append(labels - labels_of(side))
                assert sides[0] == sides[1], rule["alert"]


def test_alert_of_a_store_that_is_down_needs_no_number_of_failures_per_second() -> None:
    """Each prompt counts one lookup that failed, whatever the store: few prompts, few failures."""
    failures, reads = "sglang:cake_load_failures_total", "sglang:cake_read_blocks_total"
    (found,) = (
        node
        for rule in rules()
        for node in walk(promql.parse(rule["expr"]))
        if isinstance(node, promql.BinaryExpr)
        and (metrics_of(str(node.lhs)), metrics_of(str(node.rhs))) == ({failures}, {reads})
    )
    conditions = selectors_of(str(found.lhs))[failures]
    counted = {reason for reason in FAILURE_REASONS if admits(conditions, "reason", reason)}
    assert counted == {"lookup", "unavailable", "late"}  # and no fault of single blocks


def test_prometheus_scrapes_services_of_compose_at_their_ports() -> None:
    file = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    services = compose()["services"]
    scraped = {}
    for job in file["scrape_configs"]:
        (target,) = job["static_configs"][0]["targets"]
        name, _, port = target.partition(":")
        scraped[name] = job
        assert services[name]["ports"][0].rpartition(":")[2] == port
    assert scraped.keys() == {"server", "store"}
    token = Path(scraped["store"]["authorization"]["credentials_file"])
    assert f"/srv/cake/secrets/read:{token.parent}:ro" in services["prometheus"]["volumes"]
    assert all((DEPLOY / "prometheus" / name).exists() for name in file["rule_files"])
    jobs = {job["job_name"] for job in file["scrape_configs"]}
    for rule in rules():
        assert set(re.findall(r'job="([^"]*)"', rule["expr"])) <= jobs


def test_grafana_dashboard_uses_the_data_source() -> None:
    (source,) = yaml.safe_load(DATASOURCES.read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    panels = json.loads(DASHBOARD.read_text())["panels"]
    of = {"type": "prometheus", "uid": source["uid"]}
    assert all(it["datasource"] == of for panel in panels for it in [panel, *panel["targets"]])
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels})


# Every rank of a tensor-parallel group counts the tokens of the same prompts.
OF_PROMPTS = {"sglang:cake_loaded_tokens_total", "sglang:cake_computed_tokens_total"}


def test_grafana_tokens_of_prompts_are_those_of_one_rank() -> None:
    found = [selectors_of(it["expr"]) for it in targets()]
    asked = [(name, each[name]) for each in found for name in OF_PROMPTS & each.keys()]
    assert {name for name, _ in asked} == OF_PROMPTS
    for name, conditions in asked:
        ranks = [rank for rank in "0123" if admits(conditions, "tp_rank", rank)]
        assert ranks == ["0"], name


def test_grafana_failures_have_no_event_of_a_store_that_is_well() -> None:
    (panel,) = (
        it for it in json.loads(DASHBOARD.read_text())["panels"] if it["title"] == "Failures"
    )
    name = "sglang:cake_store_events_total"
    (conditions,) = (
        found[name] for it in panel["targets"] if name in (found := selectors_of(it["expr"]))
    )
    shown = {event for event in HttpCounters().events() if admits(conditions, "event", event)}
    assert HttpCounters().events().keys() - shown == {"requests", "hedges", "hedges_won"}
