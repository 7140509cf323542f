"""Random faults, and what must hold in spite of them: deterministic simulation testing of the protocol."""
