"""A pipe over several processes: what they tell each other, before, in and between mini-batches.

Messages between processes: nothing here knows what a pipeline is.
"""
