"""The replay driver: a recorded run done again from its tapes, and questions put to it."""
