"""The Grafana dashboards, as code: what an operator asks, panel by panel.

python -m deploy.dashboards    writes deploy/grafana/dashboards/*.json
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.builders.common import StackingConfig, VizLegendOptions, VizTooltipOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    ValueMap,
    ValueMappingResult,
    VariableHide,
    VariableRefresh,
)

PLACE = Path(__file__).parent / "grafana" / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
MODEL = 'model=~"$model"'
SECONDS, BYTES, RATIO, COUNT = "s", "decbytes", "percentunit", "short"

Query = tuple[str, str]  # expression, legend


@dataclass(frozen=True, slots=True)
class Graph:
    """A time series panel."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    text: str = ""
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Number:
    title: str
    unit: str
    query: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class YesOrNo:
    """A band over time for each series, of 1 and 0."""

    title: str
    query: Query
    text: str = ""


Panel = Graph | Number | YesOrNo


def quantiles(metric: str, by: str = "", at: tuple[float, ...] = (0.5, 0.95, 0.99)) -> tuple[Query, ...]:
    """Of a histogram over all chosen models, or by model."""
    labels = f"le, {by}" if by else "le"
    legend = f"{{{{{by}}}}} " if by else ""
    rates = f"sum by ({labels}) (rate({metric}_bucket{{{MODEL}}}[$__rate_interval]))"
    return tuple((f"histogram_quantile({q}, {rates})", f"{legend}p{round(100 * q)}") for q in at)


def mean(metric: str, by: str) -> Query:
    total, count = (f"sum by ({by}) (rate({metric}_{part}{{{MODEL}}}[$__rate_interval]))" for part in ("sum", "count"))
    return f"{total} / ({count} > 0)", f"{{{{{by}}}}}"


def rate(metric: str, by: str, selector: str = "") -> Query:
    return f"sum by ({by}) (rate({metric}{{{selector}}}[$__rate_interval]))", f"{{{{{by}}}}}"


REQUESTS: dict[str, tuple[Panel, ...]] = {
    "Now": (
        Number("Models in memory", COUNT, "sum(gswapd_model_resident_pages > bool 0)"),
        Number("Running", COUNT, f"sum(gswapd_requests_running{{{MODEL}}})"),
        Number("Waiting", COUNT, f"sum(gswapd_requests_waiting{{{MODEL}}})"),
        Number("Oldest wait", SECONDS, f"max(gswapd_oldest_wait_seconds{{{MODEL}}})"),
        Number("Load, p95 of an hour", SECONDS, "histogram_quantile(0.95, sum by (le) (rate(gswapd_swap_in_seconds_bucket[1h])))"),  # noqa: E501
        Number("Tokens a second", COUNT, "sum(rate(gswapd_generation_tokens_total[1m]))"),
    ),
    "What clients see": (
        Graph("Time to first token", SECONDS, quantiles("gswapd_time_to_first_token_seconds")),
        Graph("Between tokens", SECONDS, quantiles("gswapd_inter_token_latency_seconds")),
        Graph("Whole requests", SECONDS, quantiles("gswapd_e2e_request_latency_seconds")),
        Graph("Wait for a model that was not in memory", SECONDS, quantiles("gswapd_request_load_wait_seconds"),
              "From arrival to the end of the first forward pass."),
    ),
    "Load": (
        Graph("Requests by outcome", "reqps", (rate("gswapd_requests_total", "outcome", MODEL),), stacked=True),
        Graph("Rejected, by reason", "reqps", (rate("gswapd_requests_rejected_total", "reason"),), stacked=True),
        Graph("Tokens", COUNT, (
            (f"sum(rate(gswapd_prompt_tokens_total{{{MODEL}}}[$__rate_interval]))", "of prompts"),
            (f"sum(rate(gswapd_generation_tokens_total{{{MODEL}}}[$__rate_interval]))", "of answers"),
        )),
        Graph("Queues", COUNT, ((f"gswapd_requests_waiting{{{MODEL}}}", "{{model}}"),), stacked=True),
        Graph("Running", COUNT, ((f"gswapd_requests_running{{{MODEL}}}", "{{model}}"),), stacked=True),
        Graph("Oldest wait beside the bound", SECONDS, (
            (f"gswapd_oldest_wait_seconds{{{MODEL}}}", "{{model}}"), ("max(gswapd_wait_bound_seconds)", "wait_bound"))),
    ),
}  # fmt: skip

SWAPS: dict[str, tuple[Panel, ...]] = {
    "Loads": (
        Graph("Loads, p95 by model", SECONDS, quantiles("gswapd_swap_in_seconds", "model", (0.95,))),
        Graph("Mean load by stage", SECONDS, (mean("gswapd_swap_in_stage_seconds", "stage"),),
              "queue and drain come before the first page; the others are work, summed over threads."),
        Graph("Bytes by source", "Bps", (rate("gswapd_swap_in_bytes_total", "source"),), stacked=True),
        Graph("Loads", "cps", (rate("gswapd_swap_in_seconds_count", "model", MODEL),), stacked=True),
        Graph("Failed loads", COUNT, ((f"sum by (model) (increase(gswapd_swap_in_failures_total{{{MODEL}}}[5m]))", "{{model}}"),)),  # noqa: E501
        Graph("Thrash: loads soon after eviction", RATIO, (
            ("gswapd:swap_in_reloads:ratio_rate15m", "share of loads"),),
            "The share of loads that began within a minute after the model's pages were taken for another."),
    ),
    "Page-outs": (
        Graph("Page-outs by reason", "cps", (rate("gswapd_swap_outs_total", "reason"),), stacked=True),
        Graph("Age at eviction", SECONDS, quantiles("gswapd_swap_out_idle_seconds", at=(0.1, 0.5, 0.9)),
              "How long a model paged out had not been used. A low one means that memory is short."),
        Graph("Page-outs", SECONDS, quantiles("gswapd_swap_out_seconds", at=(0.5, 0.99))),
    ),
    "Memory": (
        Graph("Frames by use", COUNT, (("sum by (use) (gswapd_frames)", "{{use}}"),), stacked=True),
        Graph("Keys and values by model", COUNT, ((f"gswapd_model_kv_frames{{{MODEL}}}", "{{model}}"),), stacked=True),
        Graph("In memory by model", BYTES, ((f"gswapd_model_resident_bytes{{{MODEL}}}", "{{model}}"),), stacked=True),
        Graph("Host tier, slots", COUNT, (("sum by (state) (gswapd_host_tier_pages)", "{{state}}"),), stacked=True),
        Graph("Host tier, hit ratio", RATIO, (("gswapd:host_tier_hits:ratio_rate5m", "{{instance}}"),)),
        Graph("In memory, share of each model", RATIO, (
            (f"gswapd_model_resident_pages{{{MODEL}}} / gswapd_model_pages{{{MODEL}}}", "{{model}}"),)),
    ),
    "Workers": (
        YesOrNo("Up", ("gswapd_worker_up", "{{group}}/{{rank}}")),
        Graph("Restarts", COUNT, (("sum by (group, rank) (increase(gswapd_worker_restarts_total[5m]))", "{{group}}/{{rank}}"),)),  # noqa: E501
        Graph("Forward passes", "cps", (("sum by (group, rank) (rate(gswapd_worker_steps_total[$__rate_interval]))", "{{group}}/{{rank}}"),)),  # noqa: E501
        Graph("Resident memory", BYTES, (("gswapd_worker_resident_memory_bytes", "{{group}}/{{rank}}"),)),
        Graph("Read path", COUNT, (("sum by (path) (gswapd_worker_read_path)", "{{path}}"),), stacked=True),
        Graph("The daemon's processor time", RATIO, (("rate(process_cpu_seconds_total{job=\"gswapd\"}[$__rate_interval])", "{{instance}}"),)),  # noqa: E501
    ),
}  # fmt: skip

DASHBOARDS = {"gswapd-requests": ("gswapd / requests", REQUESTS), "gswapd-swaps": ("gswapd / swaps", SWAPS)}


def queries(panel: Panel) -> tuple[Query, ...]:
    match panel:
        case Graph():
            return panel.queries
        case Number():
            return ((panel.query, ""),)
        case YesOrNo():
            return (panel.query,)


def expressions(uid: str) -> list[str]:
    """Every query of a dashboard."""
    panels = (panel for row in DASHBOARDS[uid][1].values() for panel in row)
    return [expression for panel in panels for expression, _ in queries(panel)]


def built(uid: str) -> str:
    """A dashboard's JSON."""
    title, rows = DASHBOARDS[uid]
    board = (
        dashboard.Dashboard(title)
        .uid(uid)
        .tags(["gswapd"])
        .refresh("10s")
        .time("now-1h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("model")
            .label("Model")
            .datasource(SOURCE)
            .query("label_values(gswapd_model_pages, model)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .hide(VariableHide.DONT_HIDE)
        )
    )
    for name, panels in rows.items():
        board.with_row(dashboard.Row(name))
        for panel in panels:
            board.with_panel(_panel(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def _panel(panel: Panel) -> timeseries.Panel | stat.Panel | statetimeline.Panel:
    built = _graph(panel) if isinstance(panel, Graph) else _number(panel) if isinstance(panel, Number) else _band(panel)
    built.description(panel.text).datasource(SOURCE)
    for place, (expression, legend) in enumerate(queries(panel)):
        built.with_target(
            prometheus.Dataquery().expr(expression).legend_format(legend).ref_id("ABCDEFGH"[place]).datasource(SOURCE)
        )
    return built


def _graph(panel: Graph) -> timeseries.Panel:
    legend = VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)
    tooltip = VizTooltipOptions().mode(TooltipDisplayMode.MULTI)
    graph = timeseries.Panel().title(panel.title).unit(panel.unit).min(0).legend(legend).tooltip(tooltip)
    if panel.stacked:
        graph.fill_opacity(25).stacking(StackingConfig().mode(StackingMode.NORMAL))
    return graph.height(8).span(8)


def _number(panel: Number) -> stat.Panel:
    return stat.Panel().title(panel.title).unit(panel.unit).color_mode(BigValueColorMode.NONE).height(4).span(4)


def _band(panel: YesOrNo) -> statetimeline.Panel:
    words = ValueMap(options={"0": ValueMappingResult(text="no"), "1": ValueMappingResult(text="yes")})
    return statetimeline.Panel().title(panel.title).mappings([words]).height(8).span(8)


if __name__ == "__main__":
    for uid in DASHBOARDS:
        (PLACE / f"{uid}.json").write_text(built(uid))
