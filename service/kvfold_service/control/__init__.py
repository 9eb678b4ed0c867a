"""How a worker knows its fleet: `peers` (a file) and `ray` (actors that run workers)."""
