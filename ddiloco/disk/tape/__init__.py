"""Event tapes: what each protocol core was told, in order, and what is needed to redo the arrays."""
