"""What a step costs, beside what other runtimes make of the same work on the same machine."""
