"""The local driver: all roles in one process, as threads."""
