"""Thin command-line programs; everything that they do lives in `ddiloco`."""
