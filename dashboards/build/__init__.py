"""Grafana dashboards as code: `python -m dashboards.build` writes dashboards/rankwatch-*.json and the copies that the wheel ships; `--check` only compares.

sdk       grafana-foundation-sdk, imported in one place
names     selectors of a job, a rank, a job small enough to be drawn rank by rank
looks     colours and words for the numbers that stand for phases and states
links     where a panel leads: the rank's dashboard, the incident's page, the runbook
panels    the kinds of panel, each with what the lint asks of it
page      variables, annotations, rows, places: panels in, JSON out
job rank fleet compile   the four dashboards
lint      the rules that a dashboard keeps; standard library only
queries   the queries of a dashboard's JSON with Grafana's variables filled in; standard library only
"""
