"""The parts of the compile probe (probes/compile.py), one subject each. They run inside the rank."""
