"""One module a subcommand, imported when it runs: `main(argv, options) -> exit code`. The table of names is rankwatch.cli.COMMANDS."""
