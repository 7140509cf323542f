"""What the TPU compiler makes of a run: memory, operations, collectives, and the time that they allow."""
