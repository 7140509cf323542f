"""The workers' part in snapshots: record, collect, and begin again from one."""
