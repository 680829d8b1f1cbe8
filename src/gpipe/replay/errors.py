"""What is raised where a model cannot be replayed in parts."""


class CannotSplitError(ValueError):
    """A model's forward does what cannot be computed in parts to the same bits; says what, where, and what to do."""
