"""What layers cost, and the fastest plan for them on given devices.

What each layer costs: measured or counted.
"""
