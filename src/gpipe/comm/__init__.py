"""Messages between processes: nothing here knows what a pipeline is."""
