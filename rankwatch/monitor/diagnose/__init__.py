"""From one look at the job to verdicts. Pure: no I/O, no clock, no torch; what is remembered travels in State.

frames, stacks      what stacks say                     views, mismatch     one group through all its ranks
waits, graph        who waits for whom, and the roots   causes, progress    why a rank has not come, whether it moves
hangs               the verdict on a hang                deaths, aborts       on an end, and on one that gloo brought about
pairing, lateness, idle   garbage, stragglers, silence     ledger              what waiting has cost
arrivals, readings, found_waiting   who comes last: times of arrival, how often each is found waiting
clocks, suspended   gaps, steps, a stopped job         timeouts            when watchdogs fire, and the line that changes it
wants, words        evidence to fetch, words to say     judge               the order of all this
"""

from rankwatch.monitor.diagnose.judge import diagnose
from rankwatch.monitor.diagnose.state import State

__all__ = ["State", "diagnose"]
