"""The kinds of panel. Each takes what the lint asks of it: a title, a unit, what it shows, what to do next, queries with legends, links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import looks
from .sdk import (
    DATASOURCE,
    PromQueryFormat,
    bargauge,
    common,
    dashboard,
    heat,
    heatmap,
    model,
    prometheus,
    stat,
    statetimeline,
    statushistory,
    table,
    timeseries,
    values,
)

COARSE = 60
"""Points of a query that reads every rank of a job: 16,384 ranks at 60 points are drawn in the time that a person waits."""
Links = Sequence[dashboard.DashboardLink]
NOT_EXPORTED = "no such data"


@dataclass(frozen=True)
class Query:
    """A PromQL expression. legend: Grafana's template of the series' name; now: asked for the end of the range only."""

    expression: str
    legend: str = ""
    now: bool = False


@dataclass(frozen=True)
class About:
    """What every panel says of itself. shows: a sentence or two; next: what a person does about it; links: dashboards, or an alert's name for its runbook."""

    title: str
    unit: str
    shows: str
    next: str
    links: Sequence[dashboard.DashboardLink | str] = ()
    to: Links = ()
    width: int = 8
    height: int = 8
    no_value: str = NOT_EXPORTED
    decimals: int | None = None


def _dress(panel: Any, about: About, queries: Sequence[Query], as_table: bool = False) -> Any:
    alerts = [link for link in about.links if isinstance(link, str)]
    said = [about.shows, f"Next: {about.next}", *([f"Runbook: {', '.join(alerts)}"] if alerts else [])]
    panel = panel.title(about.title).description("\n\n".join(said)).unit(about.unit)
    panel = panel.datasource(DATASOURCE).span(about.width).height(about.height).no_value(about.no_value)
    panel = panel.links([link for link in about.links if not isinstance(link, str)])
    if about.decimals is not None:
        panel = panel.decimals(about.decimals)
    if about.to:
        panel = panel.data_links(list(about.to))
    for ref, query in zip("ABCDEFGHIJKLMNOP", queries, strict=False):
        target = prometheus.Dataquery().expr(query.expression).ref_id(ref).datasource(DATASOURCE)
        target = target.format(PromQueryFormat.TABLE if as_table else PromQueryFormat.TIME_SERIES)
        target = target.instant() if query.now or as_table else target.range()
        panel = panel.with_target(target.legend_format(query.legend) if query.legend else target)
    return panel


def number(
    about: About,
    *queries: Query,
    thresholds: dashboard.ThresholdsConfig | None = None,
    mappings: Sequence[model.ValueMapping] = (),
    names: dict[str, str] | None = None,
) -> Any:
    """One number now, large; names: series name -> colour, where the series' name is the news and its value is always 1."""
    panel = _dress(stat.Panel(), about, queries).reduce_options(looks.last_value()).graph_mode(values.BigValueGraphMode.NONE)
    panel = panel.color_mode(values.BigValueColorMode.BACKGROUND if thresholds or mappings or names else values.BigValueColorMode.NONE)
    panel = panel.thresholds(thresholds or looks.steps(looks.QUIET)).color_scheme(looks.by_threshold()).mappings(list(mappings))
    for series, colour in (names or {}).items():
        panel = panel.override_by_name(series, [looks.called(series.replace("_", " ")), looks.fixed(colour)])
    shown = values.BigValueTextMode.NAME if names else values.BigValueTextMode.VALUE_AND_NAME if len(queries) > 1 else values.BigValueTextMode.VALUE
    return panel.text_mode(shown)


def lines(
    about: About,
    *queries: Query,
    stacked: bool = False,
    share: bool = False,
    bars: bool = False,
    counted: bool = False,
    points: int | None = None,
    least: float | None = 0,
    most: float | None = None,
    renamed: dict[str, tuple[str, str]] | None = None,
) -> Any:
    """Lines over time, or with `stacked` areas on each other. counted: the legend has the last values, since one rank of 16,384 is thinner than a pixel.

    renamed: series name -> (name shown, colour).
    """
    panel = _dress(timeseries.Panel(), about, queries).color_scheme(looks.palette()).line_width(1).thresholds(looks.steps(looks.GOOD))
    panel = panel.fill_opacity(70 if stacked else 100 if bars else 10).show_points(values.VisibilityMode.NEVER).span_nulls(False)
    if bars:
        panel = panel.draw_style(values.GraphDrawStyle.BARS)
    if stacked or bars:
        mode = values.StackingMode.PERCENT if share else values.StackingMode.NORMAL
        panel = panel.stacking(common.StackingConfig().mode(mode).group("A"))
    for series, (name, colour) in (renamed or {}).items():
        panel = panel.override_by_name(series, [looks.called(name), looks.fixed(colour)])
    panel = panel.legend(_legend(counted)).tooltip(common.VizTooltipOptions().mode(values.TooltipDisplayMode.MULTI).sort(values.SortOrder.DESCENDING))
    if points:
        panel = panel.max_data_points(points)
    if least is not None:
        panel = panel.min(least)
    return panel.max(most) if most is not None else panel


def _legend(counted: bool = False) -> common.VizLegendOptions:
    legend = common.VizLegendOptions().show_legend(True)
    if counted:
        return legend.display_mode(values.LegendDisplayMode.TABLE).placement(values.LegendPlacement.RIGHT).calcs(["lastNotNull"])
    return legend.display_mode(values.LegendDisplayMode.LIST).placement(values.LegendPlacement.BOTTOM).calcs([])


@dataclass(frozen=True)
class Column:
    """One column of a table: the label or the query (by its place, 0 is the first) that it shows."""

    name: str
    source: str | int
    unit: str = "none"
    decimals: int | None = None
    mappings: tuple[model.ValueMapping, ...] = ()
    thresholds: dashboard.ThresholdsConfig | None = None
    links: Links = ()
    width: int | None = None


def rows(about: About, columns: Sequence[Column], *queries: Query, sort: str, falling: bool = True) -> Any:
    """A table: queries joined on the labels that all of them have, columns in this order, everything else dropped."""
    panel = _dress(table.Panel(), about, queries, as_table=True).thresholds(looks.steps(looks.QUIET)).color_scheme(looks.by_threshold())
    only = len(queries) == 1
    fields = {column.source if isinstance(column.source, str) else "Value" if only else f"Value #{'ABCDEFGHIJ'[column.source]}": column for column in columns}
    if not only:
        panel = panel.with_transformation(model.DataTransformerConfig(id_val="merge", options={}))
    chosen = {"include": {"names": list(fields)}}
    panel = panel.with_transformation(model.DataTransformerConfig(id_val="filterFieldsByName", options=chosen))
    order = {field: place for place, field in enumerate(fields)}
    renames = {field: column.name for field, column in fields.items()}
    organised = {"excludeByName": {}, "indexByName": order, "renameByName": renames}
    panel = panel.with_transformation(model.DataTransformerConfig(id_val="organize", options=organised))
    for column in columns:
        properties = [model.DynamicConfigValue(id_val="unit", value=column.unit)]
        if column.decimals is not None:
            properties.append(model.DynamicConfigValue(id_val="decimals", value=column.decimals))
        if column.width:
            properties.append(model.DynamicConfigValue(id_val="custom.width", value=column.width))
        if column.mappings:
            properties.append(model.DynamicConfigValue(id_val="mappings", value=list(column.mappings)))
        if column.thresholds:
            properties.append(model.DynamicConfigValue(id_val="thresholds", value=column.thresholds.build()))
        if column.mappings or column.thresholds:
            properties.append(model.DynamicConfigValue(id_val="custom.cellOptions", value=looks.BACKGROUND))
        if column.links:
            properties.append(model.DynamicConfigValue(id_val="links", value=[link.build() for link in column.links]))
        panel = panel.override_by_name(column.name, properties)
    panel = panel.show_header(True).cell_height(values.TableCellHeight.SM)
    return panel.sort_by([common.TableSortByFieldState().display_name(sort).desc(falling)])


def bands(about: About, *queries: Query, mappings: Sequence[model.ValueMapping], per_page: int = 32) -> Any:
    """A band a series, coloured by what it was doing."""
    panel = _dress(statetimeline.Panel(), about, queries).mappings(list(mappings)).color_scheme(looks.by_threshold()).thresholds(looks.steps(looks.QUIET))
    panel = panel.merge_values(True).show_value(values.VisibilityMode.AUTO).row_height(0.8).fill_opacity(80).line_width(0)
    return panel.legend(_legend()).per_page(per_page)


def cells(about: About, *queries: Query, mappings: Sequence[model.ValueMapping], per_page: int = 64) -> Any:
    """A row of cells a series: quiet until one deviates."""
    panel = _dress(statushistory.Panel(), about, queries).mappings(list(mappings)).color_scheme(looks.by_threshold()).thresholds(looks.steps(looks.QUIET))
    panel = panel.show_value(values.VisibilityMode.NEVER).row_height(0.8).col_width(0.95).fill_opacity(80).line_width(0)
    return panel.legend(_legend()).per_page(per_page).max_data_points(COARSE)


def heat_rows(about: About, query: Query) -> Any:
    """A row a series, colour by value; calculates no buckets."""
    colours = heatmap.HeatmapColorOptions().mode(heat.HeatmapColorMode.SCHEME).scheme("Oranges").scale(heat.HeatmapColorScale.EXPONENTIAL)
    panel = _dress(heatmap.Panel(), about, [query]).calculate(False).color(colours.exponent(0.5).steps(64).min(0).fill("dark-orange").reverse(False))
    panel = panel.cell_gap(0).show_value(values.VisibilityMode.NEVER).show_legend().max_data_points(COARSE)
    axis = heatmap.YAxisConfig().unit("none").reverse(True).axis_placement(values.AxisPlacement.LEFT)
    return panel.cell_values(heatmap.CellValues().unit(about.unit)).y_axis(axis)


def bar_each(about: About, *queries: Query, thresholds: dashboard.ThresholdsConfig, most: float | None = None) -> Any:
    """A horizontal bar a series, by its value now."""
    panel = _dress(bargauge.Panel(), about, queries).reduce_options(looks.last_value()).orientation(values.VizOrientation.HORIZONTAL)
    panel = panel.display_mode(values.BarGaugeDisplayMode.BASIC).value_mode(values.BarGaugeValueMode.TEXT).show_unfilled(True).min_viz_height(12)
    panel = panel.thresholds(thresholds).color_scheme(looks.by_threshold()).min(0).legend(_legend())
    return panel.max(most) if most is not None else panel
