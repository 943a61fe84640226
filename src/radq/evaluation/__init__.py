"""Run sweeps over prompts and guides, judge texts, and compute metrics."""
