"""grafana-foundation-sdk, imported here alone. Pinned to 0.0.21: unpinned, pip takes an older build for Grafana 10.1, whose version has an epoch."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the builder of classic dashboards recommends v2, which Grafana 10 to 12 cannot import
    from grafana_foundation_sdk.builders import bargauge, common, dashboard, heatmap, prometheus, stat, statetimeline, statushistory, table, timeseries
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models import common as values
    from grafana_foundation_sdk.models import dashboard as model
    from grafana_foundation_sdk.models import heatmap as heat
    from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = values.DataSourceRef(type_val="prometheus", uid="${datasource}")
GENERATION = 39
"""schemaVersion of Grafana 10.4. Newer ones migrate it upwards by themselves; nothing migrates downwards."""

__all__ = [
    "DATASOURCE", "GENERATION", "JSONEncoder", "PromQueryFormat", "bargauge", "common", "dashboard", "heat", "heatmap", "model", "prometheus", "stat",
    "statetimeline", "statushistory", "table", "timeseries", "values",
]  # fmt: skip
