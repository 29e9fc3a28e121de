"""report.txt: an incident for a terminal, culprit first. Reads incident.json documents of any age: a missing key is an empty part."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from rankwatch import gpu_memory, shown, traces
from rankwatch.model import PAGING
from rankwatch.report import collectives, timeline, who
from rankwatch.report.compile_parts import table

WIDTH = 110
MAX_STACKS = 24
MAX_TRACEBACK_LINES = 40
MAX_LINE = 300


def render(doc: Mapping[str, Any]) -> str:
    """The whole report as plain ASCII-art-free text, at most 110 columns where the content lets us; ends with a newline."""
    parts = [
        _headline(doc),
        _section("What to do", _bullets(doc.get("advice") or ())),
        _section("Who waited" if over(doc) else "Who waits", _waiting(doc)),
        _section("Who did what" if over(doc) else "Who does what", _who(doc)),
        _section("Exception", _crash(doc)),
        _section("Compiling", _compile(doc)),
        _section("Memory of the GPU", _bullets(memory_rows(doc))),
        _section(f"Stacks, grouped (innermost frame first{'; whole ones in stacks/rank_N.txt' if _run_dir(doc) else ''})", _stack_groups(doc)),
        _section("Full stacks", _stacks(doc)),
        _section("Process groups", _groups(doc)),
        _section("Collectives so far", collectives.table(doc.get("collectives") or ())),
        _section("The last ten minutes", timeline.lines(table(doc, "timeline"))),
        _section("Evidence", _bullets(doc.get("evidence") or ())),
        _section("Missing evidence", _bullets(doc.get("missing_evidence") or ())),
        _section("History", _history(doc)),
        _section("Commands", (f"{where}: {command}" for where, command in who.commands(doc, over(doc)))),
        _section("Files", _files(doc)),
        _section("Run", _run(doc)),
    ]
    return shown.clean("\n".join(filter(None, parts)) + "\n")


def verdict_words(doc: Mapping[str, Any]) -> str:
    """ "STUCK (not_entered, user_code), certain"."""
    verdict = str(doc.get("verdict", "?")).upper()
    return f"{verdict} ({doc.get('cause', '?')}, {doc.get('domain', '?')}), {doc.get('confidence', '?')}"


def over(doc: Mapping[str, Any]) -> bool:
    """Whether the incident is closed or the job that it is about has ended."""
    return doc.get("closed_at") is not None or job_ended(doc)


def healed(doc: Mapping[str, Any]) -> bool:
    """Whether the trouble has ended, and not only the job with it."""
    return doc.get("closed_at") is not None and doc.get("closed_by") != "job_ended"


def job_ended(doc: Mapping[str, Any]) -> bool:
    """Whether the run, or the attempt that the incident belongs to, has ended."""
    return (doc.get("job") or {}).get("ended_at") is not None


def end_words(doc: Mapping[str, Any]) -> str:
    """ "the job ended 07:12:04Z with exit code 1 (SIGINT to the launcher)"; "" while it runs."""
    end = doc.get("job") or {}
    reason = f" ({end['ending']})" if end.get("ending") else ""
    if end.get("state") == "restarting":
        return f"torchrun restarted the workers {shown.utc(end.get('ended_at'), date=False)} as attempt {end.get('attempt', '?')}{reason}"
    if end.get("ended_at") is not None:
        return f"the job ended {shown.utc(end['ended_at'], date=False)} with {shown.exit_words(end.get('exit_code'))}{reason}"
    return f"the job is ending{reason}" if reason and not healed(doc) else ""


def summary_words(doc: Mapping[str, Any]) -> str:
    """The summary; of a job that has ended with the words that it was so until then."""
    summary = str(doc.get("summary") or "no summary")
    until = job_ended(doc) and not healed(doc) and doc.get("verdict") != "failed"
    return f"until then: {summary}" if until else summary


def owner_words(doc: Mapping[str, Any]) -> str:
    """ "alice@example", else "the owner of the job"."""
    return str(((doc.get("run") or {}).get("labels") or {}).get("owner") or "the owner of the job")


def page_words(doc: Mapping[str, Any]) -> str:
    """Whether somebody must be woken, or was, and why (not)."""
    verdict, domain = doc.get("verdict"), doc.get("domain")
    called, end = paged_at(doc), doc.get("job") or {}
    if healed(doc):
        return f"yes, {shown.utc(called, date=False)} to {shown.utc(doc['closed_at'], date=False)}; it is over" if called is not None else "no: it is over"
    if verdict == "failed" and domain not in ("node", "network", "storage"):
        before = f"yes, from {shown.utc(called, date=False)} on; now " if called is not None else "no: "
        return f"{before}a ticket for {owner_words(doc)}"
    if job_ended(doc):
        if verdict == "failed":
            return f"yes{f', {shown.utc(called, date=False)}' if called is not None else ''}; {_next_words(doc)}"
        until = "restart" if end.get("state") == "restarting" else "end of the job"
        return f"yes, {shown.utc(called, date=False)} to the {until} {shown.utc(end['ended_at'], date=False)}; nothing to do now" if called else _no_page(until)
    if verdict in PAGING:
        return "yes: it does not end by itself"
    return "no: a ticket" if verdict == "straggler" else "no: it may end by itself"


def _next_words(doc: Mapping[str, Any]) -> str:
    """What is left to do about a node, the network or the storage that has ended a job, or an attempt of it."""
    hosts = sorted({str(host) for rank in doc.get("culprit_ranks") or () if (host := (doc.get("hosts") or {}).get(str(rank)))})
    where = f"the {doc.get('domain')}" if doc.get("domain") != "node" or len(hosts) != 1 else f"node {hosts[0]}"
    on_purpose = "; nothing to do where somebody killed the rank on purpose" if doc.get("cause") == "killed" else ""
    if (doc.get("job") or {}).get("state") == "restarting":
        return f"the workers run again, and {where} may end them again: see What to do{on_purpose}"
    return f"the job has ended, and {where} may fail the next one: see What to do before it runs there{on_purpose}"


def _no_page(until: str) -> str:
    return "no: the workers were restarted" if until == "restart" else "no: the job has ended"


def paged_at(doc: Mapping[str, Any]) -> float | None:
    """When it first said something that pages; None where it never did. A crash of the job's own code is a ticket."""
    ticket = doc.get("domain") not in ("node", "network", "storage")
    pages = (
        float(change.get("at") or 0.0) for change in doc.get("history") or ()
        if change.get("verdict") in PAGING and not (change.get("verdict") == "failed" and ticket)
    )  # fmt: skip
    return next(pages, None)


def action_words(doc: Mapping[str, Any]) -> str:
    """ "03:12:54Z rankwatch ended the workers (--on-stuck exit): ..."; "" where nothing was done."""
    action = doc.get("action") or {}
    return f"{shown.utc(action.get('at'), date=False)} {action.get('why') or action.get('taken')}" if action else ""


def times_words(doc: Mapping[str, Any]) -> str:
    """Since when, how long, until when: the line below the headline."""
    since, closed, end = doc.get("since"), doc.get("closed_at") if healed(doc) else None, doc.get("job") or {}
    ended = closed if closed is not None else end.get("ended_at")
    until = ended if ended is not None else doc.get("as_of", doc.get("updated_at"))
    parts = [f"since {shown.utc(since)}"]
    if since is not None and until is not None:
        parts.append(f"{'lasted' if ended is not None else 'for'} {shown.duration(max(0.0, until - since))}")
    if closed is not None:
        parts.append(f"closed {shown.utc(closed, date=False)}")
    parts += _timeout(doc, until)
    if doc.get("lost_rank_s"):
        parts.append(f"cost{'' if ended is not None else ' so far'} {shown.lost_words(doc['lost_rank_s'])}")
    return ", ".join(parts)


def memory_rows(doc: Mapping[str, Any]) -> list[str]:
    """ "rank 1, GPU 1: 130.0 GiB allocated (peak ...), ..." of the culprits, with what an allocation that failed has met."""
    rows = []
    for rank, each in list((doc.get("memory") or {}).items())[:8]:
        oom = each.get("oom") or {}
        where = f" at {oom['where']}" if oom.get("where") else ""
        broken_down = gpu_memory.breakdown(gpu_memory.failed({"oom": {**oom, "pools": {"all": oom.get("pools")}}}, ""))
        rows += [f"rank {rank}, {each['line']}"] if each.get("line") else []
        rows += [f"rank {rank}, the allocation that failed last{where}: {broken_down}"] if broken_down else []
    return rows


def deadline(doc: Mapping[str, Any]) -> float | None:
    """When the group's timeout is, or was, due: unix seconds; None where it has none."""
    if doc.get("timeout_at") is not None:
        return float(doc["timeout_at"])
    return float(doc.get("updated_at") or 0.0) + float(doc["timeout_left_s"]) if doc.get("timeout_left_s") is not None else None


def _timeout(doc: Mapping[str, Any], until: float | None) -> list[str]:
    due = deadline(doc)
    if due is None or until is None:
        return []
    if due <= until:
        return [f"the group timed out at {shown.utc(due, date=False)}"]
    if over(doc):
        return [f"the group's timeout was due at {shown.utc(due, date=False)}"]
    return [f"the watchdog ends the job in {shown.duration(due - until)} (at {shown.utc(due, date=False)})"]


def culprit_words(doc: Mapping[str, Any]) -> str:
    """ "rank 1 on node05, pid 21107", at most four of them."""
    culprits = list(doc.get("culprit_ranks") or ())
    if not culprits:
        return "no single rank"
    hosts, pids = doc.get("hosts") or {}, doc.get("pids") or {}

    def one(rank: int) -> str:
        host = f" on {hosts[str(rank)]}" if str(rank) in hosts else ""
        pid = f", pid {pids[str(rank)]}" if str(rank) in pids else ""
        return f"rank {rank}{host}{pid}"

    return "; ".join(map(one, culprits[:4])) + (
        f"; {shown.plural(len(culprits) - 4, 'rank')} more ({shown.short_ranks(culprits)})" if len(culprits) > 4 else ""
    )


def size_words(run: Mapping[str, Any]) -> str:
    """ "8 ranks on 1 node"."""
    return f"{shown.plural(run.get('world_size') or 0, 'rank')} on {shown.plural(run.get('nnodes') or 0, 'node')}"


def waiting_words(doc: Mapping[str, Any], limit: int = 160) -> str:
    """ "3 ranks: 0,2-3 in all_reduce seq 26 of default_pg, [1024, 1024] Float"; "" where nobody waits."""
    waiting, group = doc.get("waiting_ranks") or (), doc.get("group")
    if not waiting:
        return ""
    where = ""
    if group and doc.get("straggling"):
        where = f" at {shown.group_call('', '', str(group.get('desc') or group.get('name') or '?'), repeated=True)}"
    elif group:
        where = f" in {group_words(group)}"
    return f"{shown.plural(len(waiting), 'rank')}: {shown.short_ranks(waiting, limit)}{where}"


def call_words(doc: Mapping[str, Any]) -> str:
    """ "all_reduce seq 26 of default_pg": what is waited in."""
    return waiting_words(doc).partition(" in ")[2].partition(",")[0]


def left_words(doc: Mapping[str, Any]) -> str:
    """ "9m00s" until the watchdog as of the document, "unknown" where a timeout runs that cannot be told, "" where none runs."""
    due, until = deadline(doc), doc.get("as_of", doc.get("updated_at"))
    if over(doc) or not doc.get("waiting_ranks"):
        return ""
    if due is None or until is None:
        return "unknown" if doc.get("timeout_known") is False else ""
    return shown.duration(max(0.0, due - until))


def group_words(group: Mapping[str, Any]) -> str:
    """ "all_reduce seq 26 of default_pg, [1024, 1024] Float"."""
    sizes = " ".join(map(str, group.get("sizes") or ()))
    dtypes = " ".join(map(str, group.get("dtypes") or ()))
    payload = f", {sizes} {dtypes}".rstrip() if sizes or dtypes else ""
    return shown.group_call(str(group.get("op", "?")), group.get("seq", "?"), str(group.get("desc") or group.get("name") or "?")) + payload


def compile_words(activity: Mapping[str, Any], over: bool = False) -> str:
    """ "forward@model.py:31 (3/1): inductor for 12 s, 41 s in all, split 2 of 4; recompiled because ...".

    over: it runs no more; what is known is that it took so long at least: "...: compiled for 41 s or more, seen last in inductor".
    """
    text = f"{activity.get('frame') or '?'}"
    if activity.get("compile_id"):
        text += f" ({activity['compile_id']})"
    if over:
        took = f" for {shown.duration(activity['elapsed_s'])} or more" if activity.get("elapsed_s") is not None else ""
        text += f": compiled{took}, seen last in {activity.get('phase', '?')}"
    else:
        text += f": {activity.get('phase', '?')}"
        if activity.get("phase_s") is not None:
            text += f" for {shown.duration(activity['phase_s'])}"
        if activity.get("elapsed_s") is not None:
            text += f", {shown.duration(activity['elapsed_s'])} in all"
    if activity.get("splits"):
        text += f", split {activity.get('split')} of {activity['splits']}"
    return text + (f"; recompiled because {activity['reason']}" if activity.get("reason") else "")


def _headline(doc: Mapping[str, Any]) -> str:
    rows = [
        verdict_words(doc) + (f", incident {doc['id']}" if doc.get("id") else ""),
        *filter(None, (end_words(doc),)),
        *textwrap.wrap(summary_words(doc), WIDTH, break_long_words=False, break_on_hyphens=False),
        "",
        f"culprit  {culprit_words(doc)}" + (f", at {doc['at']}" if doc.get("at") else ""),
        f"times    {times_words(doc)}",
        f"page     {page_words(doc)}",
        *(f"action   {words}" for words in filter(None, (action_words(doc),))),
    ]
    return "\n".join(rows) + "\n"


def _section(title: str, rows: Iterable[str]) -> str:
    body = list(rows)
    return "\n".join((title, "-" * len(title), *body)) + "\n" if body else ""


def _bullets(texts: Iterable[Any]) -> list[str]:
    rows: list[str] = []
    for text in texts:
        rows += textwrap.wrap(str(text), WIDTH, initial_indent="* ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return rows


def _waiting(doc: Mapping[str, Any]) -> list[str]:
    unknown = doc.get("unknown_ranks") or ()
    rows = list(filter(None, (waiting_words(doc, 400),)))
    if doc.get("timeout_s") is not None:
        rows.append(f"timeout of that group: {shown.duration(doc['timeout_s'])}")
    if unknown:
        rows.append(f"without a report: {shown.plural(len(unknown), 'rank')}: {shown.short_ranks(unknown, 400)}")
    return rows


def _who(doc: Mapping[str, Any]) -> list[str]:
    rows = who.clusters(doc, call_words(doc))
    return [f"{'rank' if number == 1 else 'ranks'} {ranks}: {label}{f', {detail}' if detail else ''}" for number, ranks, _, label, detail, _ in rows]


def _crash(doc: Mapping[str, Any]) -> list[str]:
    rows = []
    for rank, crash in (doc.get("crash") or {}).items():
        rows.append(
            f"rank {rank}: {crash.get('type', '?')}: {shown.cut(shown.one_line(crash.get('message', '')), 300)}"
            + (f" ({crash['source']})" if crash.get("source") else "")
        )
        rows += [f"  {shown.cut(line, MAX_LINE)}" for line in traces.traceback_rows(str(crash.get("traceback") or ""), MAX_TRACEBACK_LINES)]
    return rows


def _compile(doc: Mapping[str, Any]) -> list[str]:
    table = doc.get("compile") or {}
    return _bullets(f"rank {rank}: {compile_words(activity, over(doc))}" for rank, activity in list(table.items())[:MAX_STACKS])


def _stack_groups(doc: Mapping[str, Any]) -> list[str]:
    rows: list[str] = []
    for group in (doc.get("stack_groups") or ())[:MAX_STACKS]:
        role = f" ({group['role']})" if group.get("role") in ("culprit", "waiting") else ""
        ranks = str(group.get("ranks", "?"))
        rows += [
            "",
            f"{'rank' if ranks.isdigit() else 'ranks'} {ranks}{role}",
            *(f"    {frame}" for frame in traces.folded(group.get("frames") or ("no Python frame",))),
        ]
    for title, frames in child_stacks(doc):
        rows += ["", title, *(f"    {frame}" for frame in traces.folded(frames))]
    return rows[1:]


def child_stacks(doc: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """("child process 77 of rank 1", frames) of what the culprits' children do: data-loader workers, compile workers."""
    children = doc.get("child_stacks") or {}
    return [(f"child process {child.get('pid')} of rank {rank}", list(child.get("frames") or ())) for rank, rows in children.items() for child in rows]


def _stacks(doc: Mapping[str, Any]) -> list[str]:
    """The culprits' full text where no file holds it; that none was caught is always said."""
    stacks = doc.get("stacks") or {}
    rows: list[str] = []
    for rank in map(str, (doc.get("culprit_ranks") or ())[:4]):
        if rank in stacks and not stacks[rank]:
            rows.append(f"rank {rank}: no stack was caught")
        elif rank in stacks and not _run_dir(doc):
            rows += [f"rank {rank}", *(f"    {line}" for line in stacks[rank].splitlines())]
    return rows


def _run_dir(doc: Mapping[str, Any]) -> str:
    return str((doc.get("run") or {}).get("run_dir") or "")


def _groups(doc: Mapping[str, Any]) -> list[str]:
    rows = []
    for group in doc.get("groups") or ():
        low, high = group.get("seq_min"), group.get("seq_max")
        seq = "issued seq ?" if low is None else f"issued seq {low}" if low == high else f"issued seq {low}-{high}"
        behind = f", behind: {group['behind']}" if group.get("behind") else ""
        timeout = f", timeout {shown.duration(group['timeout_s'])}" if group.get("timeout_s") is not None else ""
        name = f"{group.get('desc', '?')} ({group.get('backend', '?')}) ranks {group.get('ranks', '?')}"
        rows.append(f"{'>' if group.get('waited_on') else ' '} {name}: {seq}{behind}{timeout}")
    return rows


def _history(doc: Mapping[str, Any]) -> list[str]:
    rows = [
        f"{shown.utc(c.get('at'), date=False)} {c.get('verdict')} ({c.get('cause')}) rank {shown.short_ranks(c.get('culprit_ranks') or ())}"
        for c in doc.get("history") or ()
    ]
    if healed(doc) and not ends_recovered(doc):
        rows.append(f"{shown.utc(doc['closed_at'], date=False)} recovered")
    return rows


def ends_recovered(doc: Mapping[str, Any]) -> bool:
    """Whether the history itself tells the end."""
    history = list(doc.get("history") or ())
    return bool(history) and history[-1].get("verdict") == "recovered"


def _files(doc: Mapping[str, Any]) -> list[str]:
    run_dir = _run_dir(doc)
    if not run_dir:
        return []
    rows = [f"{run_dir}/incidents/{doc.get('id')}/", "    incident.json, index.html, report.txt"]
    caught = [int(rank) for rank, text in (doc.get("stacks") or {}).items() if text]
    if caught:
        rows.append(f"    stacks/rank_N.txt of {shown.rank_words(caught, 200)}")
    recorders = list(doc.get("recorder_files") or ())
    if recorders:
        rows.append(f"    {' '.join(recorders[:8])}" + (f" and {len(recorders) - 8} more" if len(recorders) > 8 else ""))
    return rows


def _run(doc: Mapping[str, Any]) -> list[str]:
    run = doc.get("run") or {}
    if not run:
        return []
    versions = ", ".join(f"{name} {version}" for name, version in (run.get("versions") or {}).items() if version)
    command = "command: " + " ".join(run.get("command") or ())
    rows = [
        f"job {run.get('job_id')}, {size_words(run)}, attempt {run.get('attempt')}",
        *textwrap.wrap(command, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False),
    ]
    if versions:
        rows.append(f"versions: {versions}")
    labels = dict(run.get("labels") or {})
    if labels.get("owner"):
        rows.append(f"owner: {labels.pop('owner')}")
    if labels:
        rows.append("labels: " + ", ".join(f"{name}={value}" for name, value in labels.items()))
    if run.get("status_url") and not over(doc):
        rows.append(f"live: {run['status_url']}")
    return rows
