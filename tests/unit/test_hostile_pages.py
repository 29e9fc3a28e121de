"""Ranks that write markup, scripts, links and escape codes into every text that they control: pages, documents, metrics and lines show them as text."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import build_status
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rankwatch.config import Options
from rankwatch.export.prometheus import Exporter
from rankwatch.monitor.web import Web
from rankwatch.report import incident, page, status, text
from rankwatch.serve.http import Request

MARKUP = "\"><img src=x onerror=alert(1)></script><script>alert(2)</script>'><svg/onload=alert(3)>--><base href=//evil/>{{7*7}}&lt;\x1b[31m\x07\u202e\ud800\r\n"
LINK = "javascript:alert(1)//"
BUILDS = [build_status.stuck_status, build_status.compiling_status, build_status.crashed_status]
DECIDED = frozenset(("verdict", "cause", "domain", "confidence", "role", "id", "key", "state", "into", "at_wall"))
"""Words that the launcher chooses itself."""
NEVER = frozenset(("img", "iframe", "object", "embed", "base", "form", "input", "link", "applet", "frame", "foreignobject"))


def poisoned(value, how, name=""):
    """The same picture with `how` applied to every text that comes from a rank, its environment or its command, names of frames and of labels included."""
    if isinstance(value, str):
        return value if name in DECIDED else how(value)
    if dataclasses.is_dataclass(value):
        changes = {f.name: poisoned(getattr(value, f.name), how, f.name) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **changes)
    if isinstance(value, dict):
        named = name in ("by_frame", "labels", "skip_reasons", "set_environment", "capabilities", "versions")
        return {how(key) if named and isinstance(key, str) else key: poisoned(item, how, str(key)) for key, item in value.items()}
    return type(value)(poisoned(item, how, name) for item in value) if isinstance(value, (list, tuple)) else value


class Page(HTMLParser):
    """What a browser would make of a page: scripts, and all that could run or load something."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.scripts, self.trouble, self.text = [], [], []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        if tag == "script":
            self.scripts.append(dict(attrs).get("nonce") or dict(attrs).get("type", ""))
        if tag in NEVER:
            self.trouble.append(tag)
        for name, value in attrs:
            if name.startswith("on") or name in ("srcdoc", "formaction", "http-equiv", "xlink:href", "src", "action"):
                self.trouble.append(f"{tag} {name}={value}")
            if name == "href" and re.match(r"\s*[a-z]+:", value or "", re.IGNORECASE) and not re.match(r"https?:", value):
                self.trouble.append(f"{tag} {name}={value}")

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(params=BUILDS, ids=lambda build: build.__name__)
def build(request):
    return request.param


def pages(picture):
    """Every page of the server for a picture, by path."""
    files = SimpleNamespace(known=lambda one: False, path_of=None, home="/nowhere")
    routes = Web(Options(listen="off"), files, lambda: picture, lambda line: None).routes()
    first = picture.open_incidents[0].id
    yield "/", routes["/"](Request("/", nonce="N0nce"))
    yield "/incidents/", routes["/incidents/"](Request(f"/incidents/{first}/", nonce="N0nce"))


@pytest.mark.parametrize(
    "how", [lambda text: text + MARKUP, lambda text: MARKUP + text, lambda text: LINK, lambda text: MARKUP * 30], ids=["after", "before", "link", "long"]
)
def test_no_page_runs_or_loads_what_a_rank_has_written(build, how):
    clean = {path: Page(response.payload.decode()) for path, response in pages(build())}
    for path, response in pages(poisoned(build(), how)):
        assert response.status == 200
        found = Page(response.payload.decode())
        assert found.trouble == []
        assert found.scripts == clean[path].scripts
        assert set(found.scripts) <= {"N0nce", "application/json"}


def test_what_was_written_is_shown_as_text(build):
    for _, response in pages(poisoned(build(), lambda text: text + MARKUP)):
        source = response.payload.decode()
        assert "<img src=x onerror=alert(1)>" in "".join(Page(source).text)
        assert "{{7*7}}" in source
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", source)


def test_written_pages_and_reports_of_an_incident_are_as_safe(build):
    picture = poisoned(build(), lambda text: text + MARKUP)
    document = json.loads(json.dumps(incident.to_json(picture.open_incidents[0], picture)))
    found = Page(page.render(document))
    assert found.trouble == []
    assert len(found.scripts) == len(Page(page.render(incident.to_json(build().open_incidents[0], build()))).scripts)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", text.render(document))


def test_a_page_stays_bounded_when_every_text_is_as_long_as_a_slot_lets_it_be(build):
    picture = poisoned(build(), lambda text: "<" * 4096)
    assert len(status.render(picture)) < 8_000_000
    assert len(page.render(incident.to_json(picture.open_incidents[0], picture))) < 8_000_000


def test_metrics_stay_well_formed_and_no_series_can_be_forged(build):
    forged = 'x"} 1\nrankwatch_rank_up{rank="7"} 0\nrankwatch_forged{a="\\'
    for how in (lambda text: text + MARKUP, lambda text: forged):
        body, _ = Exporter("full").render(poisoned(build(), how), "text/plain")
        samples = [sample for family in text_string_to_metric_families(body.decode()) for sample in family.samples]
        clean, _ = Exporter("full").render(build(), "text/plain")
        assert {sample.name for sample in samples} <= {sample.name for family in text_string_to_metric_families(clean.decode()) for sample in family.samples}
        up = [sample for sample in samples if sample.name == "rankwatch_rank_up"]
        assert len(up) == build().job.world_size
