"""Decoding: the steering of one step, the loop over steps, and best-of-n."""
