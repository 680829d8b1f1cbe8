"""What a pipeline will do, as data and pure functions: programs, schedules, cuts. Nothing here imports torch."""
