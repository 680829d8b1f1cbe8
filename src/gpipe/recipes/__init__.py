"""What `gpipe train` trains, on the public interface alone, as your own code would."""
