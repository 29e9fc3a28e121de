"""Prometheus families from the table in rankwatch.wire.signals. The only user of prometheus_client."""
