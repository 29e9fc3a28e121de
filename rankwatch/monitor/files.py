"""What a run leaves on disk, as tasks for the writer: run.json, events.jsonl, one directory an incident, within the run's caps.

Documents are rendered in the writer's thread; a document is only rendered from frozen values, so it shows the moment it was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rankwatch import redact
from rankwatch.model import PAGING, Incident, Stack, Status
from rankwatch.monitor.archive import Archive
from rankwatch.monitor.writer import Writer
from rankwatch.report import incident as incident_report
from rankwatch.report import page, text
from rankwatch.report import run as run_report
from rankwatch.report import status as status_page

MAX_INCIDENTS = 50
MAX_BYTES = 200 << 20
PER_RANK_FILES_UP_TO = 64
REPRESENTATIVES = 8
PAGE_EVERY_S = 60.0  # the last state as a page, beside each change of an incident: of a launcher that is killed it is all that is left
FIRST_PAGE_S = 10.0  # not while the job starts
MAX_REFUSED = 256  # ids; one that is forgotten is refused anew


@dataclass(slots=True)
class _Kept:
    paging: bool = False
    sizes: dict[str, int] = field(default_factory=dict)


class RunFiles:
    """Files of one launcher. `prefix` is "" on node 0, "nodes/<host>-<nonce>/" on the others."""

    def __init__(self, writer: Writer, prefix: str = "", archive: Archive | None = None) -> None:
        self._writer = writer
        self.prefix = prefix
        self._archive = archive
        self._pictured: tuple[float, tuple[object, ...]] | None = None  # when, and which open incidents it showed
        self._kept: dict[str, _Kept] = {}
        self._refused: dict[str, None] = {}

    @property
    def home(self) -> str:
        """The folder of all that this launcher writes."""
        return self._writer.path_of(self.prefix.rstrip("/")) if self.prefix else self._writer.root

    def run(self, status: Status) -> None:
        """run.json, at the start and at the end."""
        self._writer.write(f"{self.prefix}run.json", lambda: as_json(run_report.to_json(status)))

    def state(self, status: Status, now: float, final: bool = False) -> None:
        """index.html, the status page as it is now: when an incident opens, changes or ends, else every PAGE_EVERY_S, and at the end."""
        told = tuple((incident.id, incident.verdict.verdict, incident.verdict.culprit_ranks) for incident in status.open_incidents)
        before = self._pictured = self._pictured or (now - PAGE_EVERY_S + FIRST_PAGE_S, ())
        if not final and before[1] == told and 0 <= now - before[0] < PAGE_EVERY_S:
            return
        self._pictured = now, told

        def rendered(files: bool) -> bytes:
            return status_page.render(status, live=False, files=files).encode("utf-8", "replace")

        self._writer.write(f"{self.prefix}index.html", lambda: rendered(True))
        self._keep("index.html", lambda: rendered(False))

    def _keep(self, name: str, render: Callable[[], bytes]) -> None:
        """Into the archive too; only node 0's, which has the whole job."""
        if self._archive is not None and not self.prefix:
            self._archive.put(name, render)

    def event(self, wall_at: float, kind: str, fields: Mapping[str, Any]) -> None:
        """One line of events.jsonl, without secrets."""
        self._writer.append(f"{self.prefix}events.jsonl", as_json({"at": round(wall_at, 3), "event": kind, **_public(fields)}, indent=None))

    def compiles(self, document: Mapping[str, Any]) -> None:
        """compile.json: what all ranks have compiled. The document is not changed after it was handed over."""
        self._writer.write(f"{self.prefix}compile.json", lambda: as_json(document, indent=None))

    def compile_text(self, line: Mapping[str, Any]) -> None:
        """One line of compile/texts.jsonl, already without secrets."""
        self._writer.append(f"{self.prefix}compile/texts.jsonl", as_json(line, indent=None))

    def control(self, document: Mapping[str, Any]) -> None:
        """control.json: where this launcher answers processes of the same user on its node."""
        self._writer.write(f"{self.prefix}control.json", lambda: as_json(document))

    def incident(self, incident: Incident, status: Status) -> None:
        """incident.json first, then report.txt, index.html and a file for each stack."""
        if not self.admit(incident):
            return
        place = self.place(incident.id)
        kept = self._kept[incident.id]

        def document() -> dict[str, Any]:
            return incident_report.to_json(incident, status)

        def rendered(name: str, data: bytes) -> bytes:
            kept.sizes[name] = len(data)
            return data

        self._writer.write(f"{place}/incident.json", lambda: rendered("incident.json", as_json(document())))
        self._writer.write(f"{place}/report.txt", lambda: rendered("report.txt", text.render(document()).encode("utf-8", "replace")))
        self._writer.write(f"{place}/index.html", lambda: rendered("index.html", page.render(document()).encode("utf-8", "replace")))
        self._keep(f"{place}/incident.json", lambda: as_json(document()))
        self._keep(f"{place}/report.txt", lambda: text.render(document()).encode("utf-8", "replace"))
        self._keep(f"{place}/index.html", lambda: page.render(document(), files=False).encode("utf-8", "replace"))
        for rank in self.ranks_shown(incident, incident.stacks, status):
            self._writer.write(f"{place}/stacks/rank_{rank}.txt", _stack_file(incident.stacks[rank]))

    def recorders(self, incident: Incident, status: Status, documents: Mapping[int, Mapping[str, bytes]]) -> tuple[str, ...]:
        """fr/rank_<N>.json of these ranks, as torch wrote them; their names within the incident's directory."""
        if incident.id not in self._kept:
            return ()
        names = []
        for rank in self.ranks_shown(incident, documents, status):
            # The recorder with entries is the one that tools want; a second one of the same process gets its own name.
            ordered = sorted(documents[rank].items(), key=lambda item: (b'"entries"' not in item[1], "nccl" not in item[0]))
            for position, (recorder, data) in enumerate(ordered):
                if position and b'"entries"' not in data:
                    continue
                name = f"fr/rank_{rank}.json" if not position else f"fr/rank_{rank}.{recorder}.json"
                self._kept[incident.id].sizes[name] = len(data)
                self._writer.write(f"{self.place(incident.id)}/{name}", data)
                names.append(name)
        return tuple(names)

    def place(self, incident_id: str) -> str:
        """The incident's directory, relative to the writer's root."""
        return f"{self.prefix}incidents/{incident_id}"

    def path_of(self, incident_id: str, name: str = "") -> str:
        """Where the incident's directory or a file in it is."""
        return self._writer.path_of(f"{self.place(incident_id)}/{name}" if name else self.place(incident_id))

    def known(self, incident_id: str) -> bool:
        """Whether this run has written (and not pruned) an incident of that id."""
        return incident_id in self._kept

    def admit(self, incident: Incident) -> bool:
        """Make room within the caps. Incidents that paged are never pruned; a new one that does not page may be refused."""
        paging = incident.verdict.verdict in PAGING or any(change.verdict in PAGING for change in incident.history)
        kept = self._kept.get(incident.id)
        if kept is None:
            if not paging and incident.id in self._refused:
                return False
            kept = self._kept[incident.id] = _Kept()
        kept.paging = kept.paging or paging
        while len(self._kept) > MAX_INCIDENTS or sum(sum(other.sizes.values()) for other in self._kept.values()) > MAX_BYTES:
            oldest = next((name for name, other in self._kept.items() if not other.paging and name != incident.id), None)
            if oldest is None:
                break
            del self._kept[oldest]
            self._writer.remove(self.place(oldest))
        if not kept.paging and (len(self._kept) > MAX_INCIDENTS):
            del self._kept[incident.id]
            self._refused[incident.id] = None
            while len(self._refused) > MAX_REFUSED:
                del self._refused[next(iter(self._refused))]
            self._writer.remove(self.place(incident.id))
            return False
        return True

    def ranks_shown(self, incident: Incident, available: Iterable[int], status: Status) -> list[int]:
        """Of these ranks those that get files of their own: all of a small job, else the culprits and some of the others."""
        ranks = sorted(available)
        if status.job.world_size <= PER_RANK_FILES_UP_TO:
            return ranks
        culprits = set(incident.verdict.culprit_ranks)
        return [*(rank for rank in ranks if rank in culprits), *[rank for rank in ranks if rank not in culprits][:REPRESENTATIVES]]


def _stack_file(stack: Stack) -> Callable[[], bytes]:
    return lambda: (incident_report.stack_text(stack) or f"no stack: {stack.error}\n").encode("utf-8", "replace")


def _public(value: Any) -> Any:
    """Texts in it, however deep, without secrets."""
    if isinstance(value, str):
        return redact.text(value)
    if isinstance(value, Mapping):
        return {key: _public(item) for key, item in value.items()}
    return [_public(item) for item in value] if isinstance(value, (list, tuple)) else value


def as_json(document: Mapping[str, Any], indent: int | None = 1) -> bytes:
    """UTF-8 JSON with a newline at its end; what JSON cannot say becomes text."""
    separators = (",", ":") if indent is None else None
    return (json.dumps(document, indent=indent, separators=separators, default=str, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
