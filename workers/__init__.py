"""Prefill and decode workers, their keeper, and the devices."""
