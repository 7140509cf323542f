"""A fleet of protocol cores in virtual time: clock, links, availability. Arrays, if any, are behind ports."""
