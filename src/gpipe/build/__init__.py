"""From the user's arguments to a pipe: what they mean, whether they can be, and the stages that they make."""
