"""What both processes share: slot layout, environment names, phases, the table of signals. Standard library only."""
