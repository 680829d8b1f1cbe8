"""Plans for networks: which way of training them is fastest on devices that they fit on.

What each layer costs: measured or counted.
"""
