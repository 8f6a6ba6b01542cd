"""The job that labels rejected draft tokens by what they do to answers, and trains the classifier of `pad`."""
