"""The `rollforge` command: one file per command, found and guarded by `main`."""
