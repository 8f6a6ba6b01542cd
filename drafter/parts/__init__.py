"""Parts of rows: what a guide, images, log-probabilities, a learner and the text of an output add to them."""
