"""Training jobs built on the public interface alone, as your own code would be."""
