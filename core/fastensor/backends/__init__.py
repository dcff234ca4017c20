"""Where bytes move: each backend takes an image to a file and brings a file's bytes back."""
