"""The HTTP server of a launcher. Routes are handed in as callables: it knows nothing of ranks or incidents."""
