"""Other toolkits, each in an environment of its own, to measure beside. Calls of them, none of their code."""
