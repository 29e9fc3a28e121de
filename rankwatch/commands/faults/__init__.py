"""`rankwatch demo --fault NAME`: one real job with one planted fault, what rankwatch says of it, and whether that is right.

table: what can be planted and what is to be said of it. jobs/: the training scripts, copied beside the run and started from there; they know
nothing of rankwatch. outside: what has to be done to a rank from outside. drill: runs one, tells it, judges it.
"""
