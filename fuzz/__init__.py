"""Hard input: every reader of foreign files against thousands of damaged and hostile ones. Run with `make fuzz`."""
