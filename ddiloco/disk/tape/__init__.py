"""Event tapes: every event of each protocol core, in order, and what is needed to compute the arrays again."""
