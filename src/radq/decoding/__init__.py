"""Decoding: the steering of one step, the loop over steps, and the best of n samples."""
