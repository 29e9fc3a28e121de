"""One file a signal. A probe hooks torch when its module is imported and writes to the slot; probes do not know each other."""
