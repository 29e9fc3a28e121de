"""The launcher process around stock torchrun: environment and slots for the ranks, one name rebound, the monitor beside it."""
