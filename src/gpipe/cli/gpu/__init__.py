"""The parts of `gpipe doctor --gpu`: what only a machine with accelerators can show."""
