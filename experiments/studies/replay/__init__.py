"""A recorded run done again from its tapes, and questions put to it: what happened, what would have."""
