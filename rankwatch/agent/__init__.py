"""What runs inside training processes: the standard library, rankwatch.wire, and the torch that the user has already imported.

It writes what it sees into the slot in the hook itself, never raises into the job, and never runs in descendants of a rank.
"""
