"""Processes of this machine: started, forked from a warm one, and ended with who started them."""
