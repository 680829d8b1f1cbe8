"""What `gpipe train` trains, with its models and data, by the public interface alone."""
