"""What is computed once and kept on disk."""
