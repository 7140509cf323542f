"""Goodput and uptime: the share of the chips' time spent training, and the causes of the rest."""
