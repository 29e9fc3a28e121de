"""`rankwatch doctor --peers`: whether the nodes of a job reach each other, checked before the job.

Read nodelist (who takes part; pure), own (which of them this machine is), reach (one connection's outcome, and the hello that is exchanged; pure),
ask (one look at one node), listening (the ports), check (listen, ask all until they have answered, collect their views), faults (what the views mean
together; pure), table (what people read; pure), command (the wiring).
"""
