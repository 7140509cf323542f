"""The front of every command: flags and configs in, one-line errors and exit codes out, and previews."""
