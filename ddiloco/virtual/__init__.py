"""A fleet of protocol cores in virtual time: clock, links, lives. Arrays come in through ports, if any."""
