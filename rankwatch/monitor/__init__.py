"""The supervisor's thread: read slots and sockets, judge (diagnose and incidents are pure), gather evidence, write, tell.

It never imports torch and does not assume that it is the ranks' parent. `loop` is the only wiring.
"""
