"""The run folder: its layout, atomic files, the recorder that fills it and the reader that reads it while it grows."""
