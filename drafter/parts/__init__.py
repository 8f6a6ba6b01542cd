"""Parts of rows: what guides, devices, images, log-probabilities, learners and the text of an output add to them."""
