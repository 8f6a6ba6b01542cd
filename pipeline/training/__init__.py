"""The training job: a draft head learns from distilled text, on Ray Train and DeepSpeed."""
