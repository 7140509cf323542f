"""What only studies need: simulators, calibration, reports and figures."""
