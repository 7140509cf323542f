"""Consistent snapshots of a whole run on disk, and what may change before a run resumes from one."""
