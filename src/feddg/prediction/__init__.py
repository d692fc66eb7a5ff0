"""Use of finished runs: predictions, exports, model cards and further evaluation."""
