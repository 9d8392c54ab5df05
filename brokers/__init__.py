"""The shared structures: what lies in Redis, and what travels over ZeroMQ."""
