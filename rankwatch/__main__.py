"""`python -m rankwatch` is the console script."""

from rankwatch.cli import main

raise SystemExit(main())
