"""Shared by both sides of the wire: messages, bytes of fragments, credentials and terms."""
