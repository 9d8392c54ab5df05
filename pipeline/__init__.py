"""Facts and rules: what a job is, how it may move, what travels between workers.

Nothing here opens a socket, reads a clock or knows torch; the shells are in ``brokers``, ``workers`` and ``api``.
"""
