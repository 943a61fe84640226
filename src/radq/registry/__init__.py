"""Guides that an operator serves: their file, ranges and limits, and what every server tells about them."""
