"""Pipeline schedules as data: actions, dependencies, laws, schedules, completion to programs, and simulation."""
