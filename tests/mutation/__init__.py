"""Mistakes planted in the code, one at a time, to see that the tests find them."""
