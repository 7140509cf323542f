"""The drivers: they give the protocol cores a clock, arrays, threads and wires."""
