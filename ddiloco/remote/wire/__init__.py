"""What both ends of the wire share: messages, bytes of fragments, credentials and terms."""
