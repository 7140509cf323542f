"""Goodput and uptime: what share of the chips' time became training, and what took the rest."""
