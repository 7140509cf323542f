"""Tests of `ddiloco.settings`."""
