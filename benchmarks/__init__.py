"""Speed and calibration, measured in one run beside a plain loop. Run with `make bench`."""
