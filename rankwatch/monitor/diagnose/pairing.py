"""Ranks that pair different operations without hanging: NCCL trains on, and the results are garbage.

A lead of some operations is everyday noise; a lead that stays the same while the numbers move is suspicious; different operations or
sizes at equal numbers are the proof.
"""

from __future__ import annotations

from collections import Counter

from rankwatch.model import Collective, Verdict, WaitedOn, Want
from rankwatch.monitor.diagnose import mismatch, words
from rankwatch.monitor.diagnose.scene import Scene
from rankwatch.monitor.diagnose.state import Lead
from rankwatch.monitor.diagnose.views import View

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankwatch.monitor.diagnose.wants import Asked

_COMMON = 400  # newest equal numbers that are compared
_PROOF = 3  # so many of them have to differ


def look(views: Iterable[View], scene: Scene, asked: Asked) -> tuple[dict[tuple[object, ...], Lead], dict[tuple[object, ...], Verdict], list[Want]]:
    """Leads to remember, proven divergences by group, and the recorders to read."""
    leads: dict[tuple[object, ...], Lead] = {}
    proven: dict[tuple[object, ...], Verdict] = {}
    wanted: list[Want] = []
    for view in views:
        if len(view.members) < 2 or any(member.stale for member in view.members.values()):
            continue
        lowest = min(member.entered for member in view.members.values())
        ahead = tuple(sorted((rank, member.entered - lowest) for rank, member in view.members.items() if member.entered > lowest))
        key = (*view.key, view.group.generation)
        old = scene.state.leads.get(key)
        if not ahead or lowest == 0:
            continue
        if old is None or old.leads != ahead:
            leads[key] = Lead(ahead, 0, lowest)
            continue
        lead = leads[key] = Lead(ahead, old.polls + (lowest > old.lowest), lowest)
        if lead.polls < scene.limits.lead_polls:
            continue
        verdict = scene.state.diverged.get(key) or _prove(view, scene)
        if verdict is not None:
            proven[key] = verdict
        elif chosen := asked.due("recorder", view.members, scene.limits.rerecord_s, scene.limits.max_recorders):
            wanted.append(Want("recorder", chosen, "one rank's numbers stay ahead"))
    return leads, proven, wanted


def _prove(view: View, scene: Scene) -> Verdict | None:
    by_seq: dict[int, dict[int, Collective]] = {}
    for rank, member in view.members.items():
        for entry in scene.ranks[rank].collectives[-_COMMON:]:
            if entry.group == view.group.name and entry.generation == member.group.generation and not entry.is_p2p:
                by_seq.setdefault(entry.seq, {})[rank] = entry
    common = {seq: entries for seq, entries in by_seq.items() if len(entries) > 1}
    odd = {seq: found for seq in sorted(common) if (found := mismatch.compare(common[seq])) is not None}
    if len(odd) < _PROOF:
        return None
    votes = Counter(rank for found in odd.values() if found.majority for rank in found.culprits)
    culprits = tuple(sorted(rank for rank, count in votes.items() if 2 * count > len(odd))) or tuple(sorted(view.members))
    first = next(iter(odd))
    sides = ", ".join(f"{words.ranks_text(ranks)}: {text}" for text, ranks in odd[first].classes[:3])
    entry = next(iter(common[first].values()))
    return Verdict(
        key="", verdict="diverged", cause="mismatch", domain="user_code", culprit_ranks=culprits, waiting_ranks=(), since=scene.now,
        summary=f"ranks pair different operations in {view.label} since #{first} or earlier without hanging ({sides}); results since then are garbage",
        group=WaitedOn(view.group.name, view.group.desc, view.group.ranks, entry.op, first, entry.input_sizes, entry.dtypes),
        advice=("Stop the job: what it learned since then is worthless.", *words.advice("mismatch")),
        evidence=(
            f"{len(odd)} of {len(common)} common sequence numbers differ in operation, size or dtype",
            *mismatch.evidence(odd[first], f"#{first} of {view.label}", {}),
        ),
    )  # fmt: skip
