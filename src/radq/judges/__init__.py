"""Judges, which score texts: classifiers, ONNX models, logistic regressions on embeddings, and reward models."""
