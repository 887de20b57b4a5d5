"""Serve one model with several engines, on this machine or on the machines of a Ray cluster."""
