"""The workers' part in snapshots: recording states and collecting them."""
