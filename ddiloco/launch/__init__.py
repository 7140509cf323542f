"""Starts the roles of a run as processes of this machine, and ends them with their parent."""
