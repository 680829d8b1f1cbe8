"""A pipe over processes: how they meet, agree, send, add up gradients, and detect failures.

Messages between processes: nothing here knows what a pipeline is.
"""
