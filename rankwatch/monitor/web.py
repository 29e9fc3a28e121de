"""The status server of one launcher: routes from the published Status to the pages of report/ and export/. Serving is serve/server.py's."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from rankwatch.config import Options
from rankwatch.model import Incident, Status
from rankwatch.monitor.files import RunFiles, as_json
from rankwatch.monitor.pool import Job
from rankwatch.serve.shared import Shared

if TYPE_CHECKING:
    from rankwatch.export.prometheus import Exporter
    from rankwatch.serve.server import Request, Response, Route, Server
    from rankwatch.serve.tls import Tls

TOKEN = "token"
MAX_FILE_BYTES = 64 << 20
STALE_AFTER_S = 10.0
START_WAIT_S = 2.0  # a file server or a name server that does not answer must not hold the looks up
JSON, HTML, TEXT = "application/json", "text/html; charset=utf-8", "text/plain; charset=utf-8"
_FILE = re.compile(r"/incidents/([0-9A-Za-z-]{1,64})/((?:stacks|fr)/rank_\d+(?:\.\w+)?\.(?:txt|json)|incident\.json|report\.txt|index\.html|)\Z")


class Web:
    """Started once the workers run: prometheus_client and jinja2 are imported then, beside the ranks' own start. Routes run in the server's threads."""

    def __init__(
        self, options: Options, files: RunFiles, status: Callable[[], Status], say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._files = files
        self._status = status
        self._say = say
        self._clock = clock
        self._server: Server | None = None
        self._exporter: Exporter | None = None
        self._started = False
        self._stopped = False
        self._url = ""
        self.token_at = ""  # the file of the token that the server asks for
        self._shared_home, self._shared_state = Shared(self._home, status), Shared(self._state, status)

    def start(self) -> None:
        """Listen, or say in one line why not. The job does not depend on it. A second call does nothing.

        Waits for START_WAIT_S at most: the token's file and the name in --listen may be asked of servers that do not answer. `url` is then there later.
        """
        if self._started or self._options.listen == "off":
            return
        self._started = True
        starting = Job(self._begin)
        threading.Thread(target=starting.run, name="rankwatch-web", daemon=True).start()
        if not starting.wait(START_WAIT_S):
            token = f"--token-file {self._options.token_file} or " if self._options.token_file else ""
            self._say(f"no status page yet: {token}--listen {self._options.listen} has not answered for {START_WAIT_S:g} s; ranks are watched all the same")
        if starting.error is not None:
            raise starting.error

    def _begin(self) -> None:
        from rankwatch.export.prometheus import Exporter
        from rankwatch.serve.address import parse
        from rankwatch.serve.http import is_loopback
        from rankwatch.serve.server import Server

        self._exporter = Exporter(self._options.metrics_level)
        external = urlsplit(self._options.external_url).hostname
        try:
            tls = self._tls()
            token, token_at = self._token(), ""
            if token is None and (tls is None or not tls.clients_certified) and not is_loopback(parse(self._options.listen)[0]):
                token, token_at = self._drawn_token()
            server = Server(self._options.listen, self.routes(), token, hosts=(external,) if external else (), tls=tls, token_at=token_at)
            url = server.start()
        except (OSError, ValueError) as error:
            self._say(f"no status page: {error}")
            return
        if self._stopped:
            server.stop()
            return
        self._server = server
        self.token_at = token_at or (os.path.abspath(self._options.token_file) if token is not None else "")
        kept_there = bool(self._options.archive_dir)  # then --external-url is the address of many runs' pages, and none of ours is at its root
        self._url = url if kept_there else (self._options.external_url or url) if url else ""
        if server.notice:
            self._say(server.notice)

    def stop(self) -> None:
        """Stop listening; waits for nobody."""
        self._stopped = True
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    @property
    def url(self) -> str:
        """What people are told: this run's page in the archive where that has an address, else --external-url, else where the server listens; "" for none."""
        return self._status().job.archive_url or self._url

    @property
    def served_at(self) -> str:
        """Where the server itself listens, whatever --external-url says; "" while it does not."""
        server = self._server
        return server.url if server is not None else ""

    def routes(self) -> Mapping[str, Route]:
        """Path -> route, for serve.server.Server."""
        return {
            "/": self._shared_home,
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/api/v1/state": self._shared_state,
            "/api/v1/compile": self._compile,
            "/api/v1/incidents": self._incidents,
            "/incidents/": self._incident,
            "/index.html": self._shared_home,
            **({kept: self._archived} if (kept := self._archived_below()) else {}),
        }

    def _archived_below(self) -> str:
        """The path under which links to the archive begin, "/<job>-<run>/"; "" without an archive."""
        url = self._status().job.archive_url
        return f"/{unquote(url.rstrip('/').rpartition('/')[2])}/" if url else ""

    def _token(self) -> str | None:
        if not self._options.token_file:
            return None
        from rankwatch.serve.token import read_token

        try:
            return read_token(self._options.token_file)
        except ValueError as error:
            raise ValueError(f"--token-file {error}") from None

    def _drawn_token(self) -> tuple[str | None, str]:
        """A token for a run that was given none, and where it lies; (None, "") where it cannot be kept safely: then the server stays on loopback."""
        from rankwatch.serve.token import drawn_token

        path = os.path.join(os.path.abspath(self._status().job.run_dir), TOKEN)
        try:
            token = drawn_token(path)
        except ValueError as error:
            self._say(f"no token for the status page: {error}")
            return None, ""
        self._say(f"the status page asks for the token in {path} (as Bearer, or as the password of any user)")
        return token, path

    def _tls(self) -> Tls | None:
        if not self._options.tls_cert:
            return None
        from rankwatch.serve.tls import load

        try:
            return load(self._options.tls_cert, self._options.tls_key, self._options.tls_client_ca)
        except ValueError as error:
            raise ValueError(f"--tls-cert: {error}") from None

    def _archived(self, request: Request) -> Response:
        """What links to the archive name, while the launcher itself answers under --external-url."""
        from rankwatch.serve.http import find

        path = request.path[len(self._archived_below()) - 1 :]
        routes = self.routes()
        route = find({name: routes[name] for name in routes if name != self._archived_below()}, path)
        return route(replace(request, path=path)) if route is not None else _response("no such page\n", TEXT, 404)

    # -- routes ------------------------------------------------------------------------------------------------------------

    def _home(self, request: Request) -> Response:
        from rankwatch.report import status as page

        return _response(page.render(self._status(), request.nonce), HTML)

    def _metrics(self, request: Request) -> Response:
        if self._exporter is None:
            return _response("starting\n", TEXT, 503)
        body, content_type = self._exporter.render(self._status(), request.accept)
        return _response(body, content_type)

    def _healthz(self, _request: Request) -> Response:
        status = self._status()
        age_s = self._clock() - status.snapshot.now if status.snapshot is not None else None
        healthy = status.state in ("starting", "restarting", "done", "failed") or (age_s is not None and age_s < STALE_AFTER_S)
        document = {"ok": healthy, "state": status.state, "last_look_age_s": age_s, "polls": status.health.polls, "errors": status.health.errors}
        return _response(as_json(document), JSON, 200 if healthy else 503)

    def _state(self, _request: Request) -> Response:
        from rankwatch.report import state

        return _response(as_json(state.to_json(self._status()), indent=None), JSON)

    def _compile(self, _request: Request) -> Response:
        document = self._status().compile
        if not document:
            return _response(as_json({"error": "no rank has compiled anything yet"}), JSON, 404)
        return _response(as_json(document, indent=None), JSON)

    def _incidents(self, request: Request) -> Response:
        """All incidents, of very many some as rows; with ?id=ID that one, whole."""
        from rankwatch.report import incident_list

        status = self._status()
        incident_id = request.query.get("id")
        if incident_id is None:
            return _response(as_json(incident_list.to_json(status), indent=None), JSON)
        document = self._document(incident_id, _with_id(incident_id, status), status)
        if document is None:
            return _response(as_json({"error": "no such incident in this run"}), JSON, 404)
        return _response(as_json({"incidents": [document]}, indent=None), JSON)

    def _incident(self, request: Request) -> Response:
        """A file of an incident of this run and nothing else: the name is matched as a whole, the id must be one of ours."""
        from rankwatch.report import page, text

        found = _FILE.match(request.path)
        if found is None:
            return _response("no such page\n", TEXT, 404)
        incident_id, name = found[1], found[2] or "index.html"
        status = self._status()
        incident = _with_id(incident_id, status)
        if name in ("index.html", "report.txt", "incident.json"):
            document = self._document(incident_id, incident, status)
            if document is None:
                return _response("no such incident in this run\n", TEXT, 404)
            if name == "index.html":
                return _response(page.render(document, request.nonce), HTML)
            return _response(text.render(document), TEXT) if name == "report.txt" else _response(as_json(document), JSON)
        data = self._read(incident_id, name)
        if data is None:
            return _response("no such file in this run\n", TEXT, 404)
        return _response(data, JSON if name.endswith(".json") else TEXT)

    def _document(self, incident_id: str, incident: Incident | None, status: Status) -> dict[str, Any] | None:
        from rankwatch.report import incident as report

        if incident is not None:
            return report.to_json(incident, status)
        data = self._read(incident_id, "incident.json")
        try:
            document = json.loads(data) if data is not None else None
        except ValueError:
            return None
        return document if isinstance(document, dict) else None

    def _read(self, incident_id: str, name: str) -> bytes | None:
        if not self._files.known(incident_id):
            return None
        try:
            fd = os.open(self._files.path_of(incident_id, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(fd, "rb") as file:
                return file.read(MAX_FILE_BYTES)
        except OSError:
            return None


def _with_id(incident_id: str, status: Status) -> Incident | None:
    return next((incident for incident in (*status.open_incidents, *status.closed_incidents) if incident.id == incident_id), None)


def _response(body: bytes | str, content_type: str, status: int = 200) -> Response:
    from rankwatch.serve.server import Response

    return Response(body, content_type, status)
