"""What will be done, as data: actions, rules, laws, lowering, the ten schedules, the simulator."""
