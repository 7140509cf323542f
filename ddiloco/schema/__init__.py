"""The events of the protocol as bytes: one schema, for the wire and for tapes."""
