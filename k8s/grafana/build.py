"""Writes the dashboards as JSON beside this file: `python k8s/grafana/build.py`.

Needs grafana-foundation-sdk==1769699379!11.6.0 (an unpinned install takes an old schema); who uses the JSON needs
nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import StackingConfig, VizLegendOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, GridPos, VariableRefresh

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from panels import DASHBOARDS, Panel  # noqa: E402

WIDTH, HEIGHT = 24, 8
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")


def built() -> dict[str, str]:
    """File name and content of each dashboard."""
    return {f"{name}.json": _encoded(name, *found) for name, found in DASHBOARDS.items()}


def _encoded(name: str, title: str, rows: dict[str, list[Panel]]) -> str:
    board = (
        dashboard.Dashboard(f"slipstream · {title}")
        .uid(f"slipstream-{name}")
        .tags(["slipstream"])
        .editable()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_runs())
        .link(
            dashboard.DashboardLink("slipstream")
            .type("dashboards")
            .tags(["slipstream"])
            .as_dropdown(True)
            .keep_time(True)
            .include_vars(True)
        )
    )
    y = 0
    for row, panels in rows.items():
        board.with_row(dashboard.Row(row).grid_pos(_place(0, y, WIDTH, 1)))
        y += 1
        for line in _lines(panels):
            wide = WIDTH // len(line)
            for column, panel in enumerate(line):
                board.with_panel(_panel(panel).grid_pos(_place(column * wide, y, wide, HEIGHT)))
            y += HEIGHT
    return json.dumps(json.loads(json.dumps(board.build(), cls=JSONEncoder)), indent=2, sort_keys=True) + "\n"


def _lines(panels: list[Panel]) -> list[list[Panel]]:
    """Rows of two to four panels, as even as can be."""
    most = 3 if len(panels) % 3 == 0 else 2 if len(panels) % 4 == 2 or len(panels) < 4 else 4
    return [panels[start : start + most] for start in range(0, len(panels), most)]


def _place(x: int, y: int, width: int, height: int) -> GridPos:
    return GridPos(h=height, w=width, x=x, y=y)


def _runs() -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable("run")
        .label("Run")
        .query("label_values(slipstream_ledger_step, run)")
        .datasource(SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")  # also where the scrape config gives no run
    )


def _panel(panel: Panel) -> timeseries.Panel | stat.Panel:
    made = stat.Panel() if panel.kind == "stat" else _curves(panel)
    made.title(panel.title).description(panel.about).unit(panel.unit).datasource(SOURCE)
    if panel.low is not None:
        made.min(panel.low)
    if panel.high is not None:
        made.max(panel.high)
    for index, (legend, query) in enumerate(panel.queries):
        made.with_target(prometheus.Dataquery().expr(query).legend_format(legend).ref_id(chr(ord("A") + index)))
    return made


def _curves(panel: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .line_width(1.5)
        .fill_opacity(25 if panel.stacked else 6)
        .show_points(common.VisibilityMode.AUTO)
    )
    if panel.stacked:
        made.stacking(StackingConfig().mode(common.StackingMode.NORMAL))
    return made.legend(_legend())


def _legend() -> VizLegendOptions:
    return (
        VizLegendOptions()
        .show_legend(True)
        .display_mode(common.LegendDisplayMode.LIST)
        .placement(common.LegendPlacement.BOTTOM)
    )


if __name__ == "__main__":
    for file, text in built().items():
        (HERE / file).write_text(text, encoding="utf-8")
