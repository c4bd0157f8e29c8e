"""The command line: one file a subcommand, each thin over the package."""
