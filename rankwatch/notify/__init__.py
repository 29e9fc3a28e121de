"""What is said on stderr, and to whom an incident is told. Pure text; the monitor's announcer prints it."""
