"""Two hosts on one machine, for tests and benchmarks, which do not know each other: see `hosts`."""
